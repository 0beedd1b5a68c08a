import copy

from slime.rollout.data_source import DataSource, RolloutDataSource
from slime.utils.types import Sample


class EasyFirst(RolloutDataSource):
    """Sorts each handful of prompts by their length."""

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = super().get_samples(num_samples)
        self.metadata["asked"] = self.metadata.get("asked", 0) + num_samples
        return sorted(groups, key=lambda group: len(group[0].prompt))


class Arithmetic(DataSource):
    """Makes its prompts itself; has the methods that slime's base class asks for."""

    def __init__(self, args):
        self.args = args
        self.sample_group_index = 0
        self.sample_index = 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        samples = []
        for _ in range(num_samples):
            number = self.sample_group_index
            prompt = Sample(prompt=f"{number % 7}1{number % 5}3=", label="0123")
            group = []
            for _ in range(self.args.n_samples_per_prompt):
                sample = copy.deepcopy(prompt)
                sample.group_index = self.sample_group_index
                sample.index = self.sample_index
                self.sample_index += 1
                group.append(sample)
            self.sample_group_index += 1
            samples.append(group)
        return samples

    def add_samples(self, samples: list[list[Sample]]):
        raise RuntimeError("this source takes nothing back")

    def save(self, rollout_id):
        pass

    def load(self, rollout_id=None):
        pass

    def __len__(self):
        return 1000
