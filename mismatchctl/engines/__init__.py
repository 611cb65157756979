"""Where the units of work run."""

from mismatchctl.engines.local import Local
from mismatchctl.engines.work import Engine, Mergeable, Shard, Work, shards_of

__all__ = ["Engine", "Local", "Mergeable", "Shard", "Work", "shards_of"]
