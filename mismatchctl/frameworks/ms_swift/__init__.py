"""ms-swift of 2026-08 (3602360a5), the Transformers backend."""

from mismatchctl.frameworks.ms_swift.framework import MsSwift
from mismatchctl.frameworks.plain import shelf_of

SHELF = shelf_of(MsSwift, versions=("2026-08",))
