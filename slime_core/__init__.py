"""slime-flow's core: everything an RL iteration needs, without Prefect."""

__version__ = "0.1.0"
