"""Kills runs at every stage boundary and at random moments, and proves that nothing was lost.

`python -m benchmarks.kill_matrix` plays 62 cases: the 7 stage boundaries times what can be killed,
and 20 random moments with random victims. Each case is a short run in a workspace of its own, on a
file store or on S3 (moto's server), killed with SIGKILL from outside and taken up with the same
command. Then an auditor that shares no code with the product looks at what is left.
"""
