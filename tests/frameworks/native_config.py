"""Read the configuration from a framework's file."""

from pathlib import Path

from mismatchctl.corrections.model import Correction
from mismatchctl.frameworks.adapter import Framework
from mismatchctl.frameworks.config_files import read_configurations


def read_native(path: str | Path, framework: str = "") -> tuple[Framework, Correction]:
    written, correction = read_configurations(path, framework)[0]
    return written.framework, correction
