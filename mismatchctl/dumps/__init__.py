"""Reading dumps: Parquet or Arrow files in, TokenBatches out, bad data named."""

from mismatchctl.dumps.arrow import MemoryTable
from mismatchctl.dumps.files import DumpFile, Unit
from mismatchctl.dumps.paths import DumpSource
from mismatchctl.dumps.plan import files_of
from mismatchctl.dumps.problems import Problems
from mismatchctl.dumps.reader import Dump, open_dump
from mismatchctl.dumps.rows import Rows

__all__ = ["Dump", "DumpFile", "DumpSource", "MemoryTable", "Problems", "Rows", "Unit", "files_of", "open_dump"]
