"""Data sources of one's own: both of slime's forms, what they remember, what is wrong with them."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime_core.data.custom_source import CustomSource, load_source
from slime_core.data.source_classes import (
    Dataset,
    RolloutDataSourceWithBuffer,
    dataset_at_hand,
)  # fmt: skip
from slime_core.data.sources import PromptSource, SourceSettings
from slime_core.errors import DataError, PluginError
from slime_core.rollout.draw_log import DrawLog
from slime_core.store.backend import open_backend

N = 2
ROWS = 5

GROUPS = """
from slime.rollout.data_source import RolloutDataSource

class Backwards(RolloutDataSource):
    '''Takes the prompts of the dataset, the longest pause first.'''
    def __init__(self, args):
        super().__init__(args)
        self.taken = 0

    def get_samples(self, num_samples):
        groups = super().get_samples(num_samples)
        self.taken += num_samples
        for group in groups:
            for sample in group:
                sample.metadata["turn"] = self.taken
        return groups[::-1]
"""

FLAT = """
import random
from slime.data import RolloutDataSource, Sample

class Picked(RolloutDataSource):
    def __init__(self, dataset, args):
        super().__init__(dataset, args)
        self.rng = random.Random(args.rollout_seed)

    def get_samples(self, num_samples):
        return [self.dataset[self.rng.randrange(len(self.dataset))] for _ in range(num_samples)]
"""

BARE = """
from slime.utils.types import Sample

class Numbers:
    '''Neither of our classes, and an iterator that nothing can save.'''
    def __init__(self, args):
        self.args = args
        self.numbers = iter(range(100))

    def get_samples(self, num_samples):
        found = []
        for _ in range(num_samples):
            number = next(self.numbers)
            found.append([Sample(prompt=f"{number} + 1", label=str(number + 1))
                          for _ in range(self.args.n_samples_per_prompt)])
        return found
"""

STATED = """
from slime.utils.types import Sample

class Counter:
    def __init__(self, args):
        self.n = args.n_samples_per_prompt
        self.client = object()
        self.next = 0

    def get_samples(self, num_samples):
        begin, self.next = self.next, self.next + num_samples
        return [[Sample(prompt=str(i)) for _ in range(self.n)] for i in range(begin, self.next)]

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]
"""

WHOLE = """
import copy
from slime.rollout.data_source import DataSource
from slime.utils.data import Dataset
from slime.utils.processing_utils import load_processor

class Whole(DataSource):
    # everything by itself, as slime's own source does: it shuffles when a pass begins
    def __init__(self, args):
        self.args = args
        self.epoch_id = self.sample_offset = 0
        self.dataset = Dataset(
            args.prompt_data, tokenizer=None, processor=load_processor("model"), max_length=None,
            prompt_key="input", label_key=None, metadata_key="metadata", seed=args.rollout_seed,
        )
        self.dataset.shuffle(self.epoch_id)

    def get_samples(self, num_samples):
        found = self.dataset.samples[self.sample_offset : self.sample_offset + num_samples]
        self.sample_offset += num_samples
        if self.sample_offset >= len(self.dataset):
            self.epoch_id += 1
            self.dataset.shuffle(self.epoch_id)
            self.sample_offset = num_samples - len(found)
            found += self.dataset.samples[: self.sample_offset]
        return [[copy.deepcopy(one) for _ in range(self.args.n_samples_per_prompt)]
                for one in found]
"""

LAZY = (
    WHOLE
    + """
class Lazy(Whole):
    # opens its file when it is first asked
    def __init__(self, args):
        self.args, self.dataset = args, None

    def get_samples(self, num_samples):
        if self.dataset is None:
            super().__init__(self.args)
        return super().get_samples(num_samples)
"""
)

BUFFERED = """
from slime.rollout.data_source import RolloutDataSourceWithBuffer

class Buffered(RolloutDataSourceWithBuffer):
    def get_samples(self, num_samples):
        samples = self._get_samples_from_buffer(num_samples)
        if len(samples) == num_samples:
            return samples
        return samples + super().get_samples(num_samples - len(samples))
"""


@pytest.fixture
def args(tmp_path):
    path = str(tmp_path / "prompts.jsonl")
    return SimpleNamespace(n_samples_per_prompt=N, rollout_seed=3, prompt_data=path)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input": f"prompt {i}"}) + "\n" for i in range(ROWS)))
    return Dataset(PromptSource(str(path), SourceSettings(n_samples_per_prompt=N)))


def source_of(folder: Path, text: str, name: str, args, dataset=None) -> CustomSource:
    file = folder / f"{name.lower()}.py"
    file.write_text(text)
    return CustomSource(f"{file}:{name}", args, dataset, N)


def prompts(draws) -> list[str]:
    return [draw.samples[0].prompt for draw in draws]


def test_groups_of_the_args_form_become_draws(tmp_path, args, dataset):
    source = source_of(tmp_path, GROUPS, "Backwards", args, dataset)
    draws = source.draw(3) + source.draw(3)
    assert prompts(draws) == ["prompt 2", "prompt 1", "prompt 0", "prompt 0", "prompt 4",
                              "prompt 3"]  # fmt: skip
    assert [draw.group_index for draw in draws] == [0, 1, 2, 3, 4, 5]
    assert [s.index for draw in draws[:2] for s in draw.samples] == [0, 1, 2, 3]
    assert draws[3].samples[0].metadata["turn"] == 6
    assert draws[0].samples[0] is not draws[0].samples[1]


def test_flat_lists_of_the_dataset_form_become_groups(tmp_path, args, dataset):
    draws = source_of(tmp_path, FLAT, "Picked", args, dataset).draw(4)
    assert [len(draw.samples) for draw in draws] == [N] * 4
    assert all(len({s.prompt for s in draw.samples}) == 1 for draw in draws)
    assert draws[0].samples[0].metadata is not draws[0].samples[1].metadata


@pytest.mark.parametrize(("text", "name"), [(GROUPS, "Backwards"), (FLAT, "Picked"),
                                            (BARE, "Numbers"), (STATED, "Counter"),
                                            (WHOLE, "Whole"), (BUFFERED, "Buffered"),
                                            (LAZY, "Lazy")])  # fmt: skip
def test_a_new_owner_draws_what_would_have_come(tmp_path, args, dataset, text, name):
    def log_of(folder: str) -> DrawLog:
        source = source_of(tmp_path, text, name, args, dataset)
        log = DrawLog(open_backend(str(tmp_path / folder)), source, lambda sample: None)
        log.refresh()
        return log

    at_once = log_of("one")
    want = [at_once.draw(segment, 3) for segment in range(4)]
    got = [log_of("two").draw(segment, 3) for segment in range(4)]
    assert [prompts(draws) for draws in got] == [prompts(draws) for draws in want]
    assert [d.group_id for draws in got for d in draws] == list(range(12))


def test_a_copy_of_slimes_own_source_has_slimes_order(tmp_path, args, dataset):
    draws = source_of(tmp_path, WHOLE, "Whole", args, dataset).draw(2 * ROWS - 1)
    orders = [list(range(ROWS)), list(range(ROWS))]
    for data_epoch, order in enumerate(orders):
        random.Random(3 + data_epoch).shuffle(order)
    assert prompts(draws) == [f"prompt {i}" for i in (*orders[0], *orders[1][:-1])]


def test_a_buffer_serves_the_oldest_or_what_its_own_filter_picks(args, dataset):
    with dataset_at_hand(dataset):
        source = RolloutDataSourceWithBuffer(args)
    source.add_samples([["a"], ["b"], ["c"]])
    assert source._get_samples_from_buffer(2) == [["a"], ["b"]] and source.buffer == [["c"]]
    assert source._get_samples_from_buffer(0) == []
    source.buffer_filter = lambda args, buffer, count: buffer[-count:]  # type: ignore[attr-defined]
    source.add_samples([["d"]])
    assert source._get_samples_from_buffer(1) == [["d"]]


def test_what_could_not_be_logged_is_drawn_again(tmp_path, args, dataset, monkeypatch):
    source = source_of(tmp_path, BARE, "Numbers", args)
    log = DrawLog(open_backend(str(tmp_path / "s")), source, lambda sample: None)
    log.draw(0, 2)
    with monkeypatch.context() as patch:
        patch.setattr("slime_core.rollout.draw_log.log_draws", _full)
        with pytest.raises(DataError, match="no space"):
            log.draw(1, 2)
    assert prompts(log.draw(1, 2)) == ["2 + 1", "3 + 1"]


def _full(*_: object) -> None:
    raise DataError("no space left")


def test_a_source_that_gives_something_else_says_why_it_cannot_go_on(tmp_path, args):
    backend = open_backend(str(tmp_path / "s"))
    DrawLog(backend, source_of(tmp_path, BARE, "Numbers", args), lambda sample: None).draw(0, 2)
    (tmp_path / "later").mkdir()
    changed = BARE.replace("range(100)", "range(5, 100)")
    other = source_of(tmp_path / "later", changed, "Numbers", args)
    with pytest.raises(
        PluginError,
        match=r"its attribute numbers, .* group 0 has another prompt "
        r"now \('5 \+ 1', it was '0 \+ 1'\); give it state_dict",
    ):
        DrawLog(backend, other, lambda sample: None).refresh()


WRONG = """
from slime.utils.types import Sample
class Fewer:
    def __init__(self, args): pass
    def get_samples(self, n): return [[Sample(prompt="p")] * 2]
class Sizes:
    def __init__(self, args): pass
    def get_samples(self, n): return [[Sample(prompt="p")] for _ in range(n)]
class Texts:
    def __init__(self, args): pass
    def get_samples(self, n): return ["p"] * n
class Breaks:
    def __init__(self, args): pass
    def get_samples(self, n): raise KeyError("rows")
class Empty:
    def __init__(self, args): pass
    def get_samples(self, n): return [[Sample(), Sample()] for _ in range(n)]
class Three:
    def __init__(self, a, b, c): pass
    def get_samples(self, n): return []
class Nothing:
    pass
def function(args): pass
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Fewer", r"get_samples\(3\) gave 1 groups; a source that ends cannot go on"),
        ("Sizes", "gave 1 samples in group 0, n_samples_per_prompt is 2"),
        ("Texts", "gave 'p' as group 0; Samples are needed"),
        ("Breaks", r"\(get_samples\) raised KeyError: 'rows'"),
        ("Empty", "a sample has no prompt"),
        ("Three", r"does not fit: it is made with \(args\) or \(dataset, args\)"),
        ("Nothing", r"has no method get_samples"),
        ("function", "is a function; a class with get_samples is needed"),
    ],
)
def test_what_is_wrong_with_a_source_is_one_sentence(tmp_path, args, name, says):
    with pytest.raises((PluginError, DataError), match=says):
        source_of(tmp_path, WRONG, name, args).draw(3)


def test_a_source_without_prompts_is_named(tmp_path, args):
    with pytest.raises(DataError, match="RolloutDataSource has no prompts to draw from"):
        args.prompt_data = None
        CustomSource("slime.rollout.data_source.RolloutDataSource", args, None, N).draw(1)
    assert load_source("slime.data.RolloutDataSource").__name__ == "FlatDataSource"


def test_the_classes_stand_alone(tmp_path, args, dataset):
    """As a person tries them in a notebook, without any run."""
    from slime_core.data.source_classes import RolloutDataSourceWithBuffer

    path = tmp_path / "p.jsonl"
    path.write_text('{"q": "a"}\n{"q": "b"}\n')
    args.prompt_data, args.input_key = str(path), "q"
    source = RolloutDataSourceWithBuffer(args)
    groups = source.get_samples(3)
    assert [[s.prompt for s in group] for group in groups] == [["a"] * N, ["b"] * N, ["a"] * N]
    assert (source.epoch_id, source.sample_offset, len(source)) == (1, 1, 2)
    source.add_samples(groups[:1])
    assert source.get_buffer_length() == 1
