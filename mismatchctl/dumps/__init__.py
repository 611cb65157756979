"""Reading dumps: Parquet files in, TokenBatches out, bad data named."""

from mismatchctl.dumps.files import DumpFile, Unit
from mismatchctl.dumps.problems import Problems
from mismatchctl.dumps.reader import Dump, open_dump

__all__ = ["Dump", "DumpFile", "Problems", "Unit", "open_dump"]
