"""Where the units of work run."""

from mismatchctl.engines.local import Local
from mismatchctl.engines.work import Engine, Part, Shard, Work, shards_of

__all__ = ["Engine", "Local", "Part", "Shard", "Work", "shards_of"]
