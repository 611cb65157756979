"""Write dumps in a training loop."""

from mismatchctl.recorder.recorder import Recorder

__all__ = ["Recorder"]
