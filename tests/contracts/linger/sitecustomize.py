"""Makes the moment between SGLang's answers and the next step as long as /slow_down says.

SGLang's own pause comes before a step, so that moment lasts as long as the operating system keeps
the scheduler waiting: microseconds, or milliseconds on a busy machine. Tests need to hit it.
"""

import importlib.abc
import importlib.machinery
import sys
import time

_SCHEDULER = "sglang.srt.managers.scheduler"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds SGLang's scheduler module as ever, and changes one method once it is loaded."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != _SCHEDULER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            _linger(module.Scheduler)

        spec.loader.exec_module = exec_module
        return spec


def _linger(scheduler_class):
    process = scheduler_class.process_batch_result

    def process_and_wait(self, *args, **kwargs):
        process(self, *args, **kwargs)
        if self.forward_sleep_time is not None:
            time.sleep(self.forward_sleep_time)

    scheduler_class.process_batch_result = process_and_wait


sys.meta_path.insert(0, _Finder())
