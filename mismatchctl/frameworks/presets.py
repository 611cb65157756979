"""Named corrections as shelves bring them: presets.yaml, each preset a configuration in the framework's own keys."""

from __future__ import annotations

from collections.abc import Iterator

from mismatchctl.correction import Correction
from mismatchctl.correction.presets import Preset
from mismatchctl.frameworks.framework import Shelf
from mismatchctl.texts import read_data


def read_presets(shelf: Shelf) -> Iterator[Preset]:
    """The presets of a shelf, oldest release first, an alias after the preset that it names again.

    A release in the file has `version`, `source`, and `presets` by name, each with `about` and `config`; a preset may
    have a `source` of its own, an `alias`, what a document says otherwise (`documented`), and `reader`, the version
    whose reading of the keys is meant where that is another one.
    """
    for release in read_data(shelf.presets) if shelf.presets.exists() else ():
        for name, words in release["presets"].items():
            version = words.get("reader", release.get("reader", release["version"]))
            config = words["config"] if "config" in words else shelf.factory(version, name)
            made = shelf.load(version).correction(config)
            correction = Correction(
                name=name, about=words["about"], weight=made.weight, gates=made.gates, loss=made.loss
            )
            source = words.get("source", release["source"].format(name=name))
            documented = words.get("documented", "")
            preset = Preset(correction, shelf.name, release["version"], source, documented=documented)
            yield preset
            if "alias" in words:
                yield preset.alias(words["alias"])
