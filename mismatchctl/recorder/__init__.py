"""Write dumps from inside a training loop."""

from mismatchctl.recorder.recorder import Recorder

__all__ = ["Recorder"]
