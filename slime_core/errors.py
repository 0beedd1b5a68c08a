"""The exception tree. A message names the thing (file, key, row, engine) and the fix."""

from __future__ import annotations


class SlimeError(Exception):
    """Base of every error that slime-flow raises on purpose."""


class ConfigError(SlimeError):
    """A flag, key or value that cannot work."""


class DataError(SlimeError):
    """A prompts file, row or rendered prompt that cannot be used."""


class StoreError(SlimeError):
    """The object store refused, lost or damaged something."""


class LostRaceError(StoreError):
    """A create-only write found another object under its key."""


class MissingError(StoreError):
    """No object stands under a key."""


class AwayError(StoreError):
    """The store cannot be used now, but may be later without a change of the run. Nothing was
    half-written."""


class UnavailableError(AwayError):
    """The object store did not answer, or asked to come later, until the deadline."""


class AccessError(AwayError):
    """The object store refused the credentials, or there are none."""


class FullError(AwayError):
    """No space is left."""


class StaleOwnerError(StoreError):
    """A newer epoch owns the run; this process must stop."""


class DigestError(StoreError):
    """Bytes or a document do not match their recorded digest."""


class EngineError(SlimeError):
    """A generation engine is unreachable, refused a request or serves wrong weights."""


class TrainerError(SlimeError):
    """A trainer rank failed or is in a state that cannot be continued."""


class RewardError(SlimeError):
    """A grader failed or returned something that is not a score."""


class PluginError(SlimeError):
    """Code given by import path could not be loaded or has the wrong signature."""


class DeadlineError(SlimeError):
    """A named wait ran past its deadline."""
