"""The Result of an analysis. The code that draws it is loaded at first use, so `import mismatchctl` stays fast."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_load_renderer: Callable[[], object] | None = None


def register_renderer(load: Callable[[], object]) -> None:
    """Set the function that creates the renderer when a result is drawn for the first time."""
    global _load_renderer
    _load_renderer = load


def load_renderer() -> object:
    if _load_renderer is None:
        raise RuntimeError("no renderer is registered: import mismatchctl first")
    return _load_renderer()
