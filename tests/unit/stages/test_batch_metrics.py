"""Numbers of a batch that depend on how its rows were made, by known values."""

import asyncio

from slime_core.counters import PrefixCacheInfo, SpecInfo
from slime_core.stages.batch_metrics import measured_metrics
from slime_core.stages.pack import pack
from slime_core.store import layout
from slime_core.store.columnar import SampleBatch
from slime_core.store.documents import read_document
from tests.unit.stages.standins import Lab
from tests.unit.store.builders import finished_sample, group_rows, seal_segment, write_groups


def samples():
    first, second, third = (finished_sample(0, i) for i in range(3))
    first.spec_info = SpecInfo(6, 8, 4, 12)
    second.spec_info = SpecInfo(0, 4, 4, 4)
    first.prefix_cache_info = PrefixCacheInfo(30, 50)
    second.prefix_cache_info = PrefixCacheInfo(0, 50)
    third.prefix_cache_info = PrefixCacheInfo(15, 20)
    first.non_generation_time, second.non_generation_time, third.non_generation_time = 0.0, 1.5, 3.0
    return [first, second, third]


def test_counters_are_summed_before_they_are_divided():
    first, second, third = samples()
    chosen = [SampleBatch.from_samples([first, second]), SampleBatch.from_samples([third])]
    assert measured_metrics(chosen) == {
        "rollout/spec_accept_rate": 0.5,
        "rollout/spec_accept_length": 2.0,
        "rollout/prefix_cache_hit_rate": 0.375,
        "rollout/avg_cached_tokens_per_sample": 15.0,
        "perf/non_generation_time/mean": 1.5,
        "perf/non_generation_time/max": 3.0,
    }


def test_what_was_measured_stands_beside_the_digest_of_the_batch(tmp_path):
    found = []
    for name, seconds in (("a", 0.0), ("b", 2.0)):
        ctx = Lab(tmp_path / name).start()
        groups = [group_rows(0), group_rows(1)]
        groups[0].samples[0].non_generation_time = seconds
        write_groups(ctx.backend, 0, groups)
        asyncio.run(pack(ctx, seal_segment(ctx.backend, 0).ref()))
        found.append(read_document(ctx.backend, layout.batch(0)))
    without, measured = found
    assert without.digest == measured.digest
    assert "measured" not in without.by
    assert measured.by["measured"] == {
        "perf/non_generation_time/mean": 0.25,
        "perf/non_generation_time/max": 2.0,
    }


def test_what_no_engine_reported_has_no_number():
    assert measured_metrics([SampleBatch.from_samples([finished_sample(0)])]) == {}
