"""Reports of layer-wise comparators: where in the network two runs part.

Other tools compare the hidden states of two runs, tensor by tensor; none names the first bad layer. Each report is
reduced to rows in the order of execution, and two answers are read off them: the first row outside the tool's own
tolerance, and the first one that parts from all before it, which a loose tolerance hides.
"""

from __future__ import annotations

from mismatchctl.frameworks.layers.judge import judge
from mismatchctl.frameworks.layers.model import LayerReport, Tensor
from mismatchctl.frameworks.layers.read import read_layers

__all__ = ["LayerReport", "Tensor", "judge", "read_layers"]
