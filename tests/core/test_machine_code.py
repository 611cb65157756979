"""The compiled kernel gives the same bits in the process that compiles it and in processes that load its machine code.

If the stored machine code is damaged or cannot be used, the kernel is compiled again.
"""

import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatchctl.core import compiler, machine_code
from mismatchctl.core.machine_code import CompiledLoop
from mismatchctl.io import process
from mismatchctl.io.files import read_regular_file
from mismatchctl.measure.kernels import MIN_COMPILED_TOKENS, choose_kernel
from mismatchctl.measure.kernels.compiled_kernel import COMPILED_KERNEL
from mismatchctl.measure.kernels.kernel import NUMPY_KERNEL

REDUCED = """
import hashlib, sys
import numpy as np
from mismatchctl.core.batch import Segments
from mismatchctl.measure.kernels.compiled_kernel import COMPILED_KERNEL
from mismatchctl.measure.kernels.kernel import PairTables, RunTables, SequencePlaces
from mismatchctl.core.bins import new_layer_table

rng, lengths = np.random.default_rng(0), np.array([5000, 3000, 17, 2048])
reference = -rng.exponential(0.35, lengths.sum()).astype(np.float32)
policy = np.minimum(reference + (rng.standard_t(3, lengths.sum()) * 0.01).astype(np.float32), 0)
ratios = COMPILED_KERNEL.compute_ratios(policy, reference, Segments.from_lengths(lengths))
pair, run = PairTables(), RunTables(new_layer_table(4))
rows = np.arange(4)
places = SequencePlaces(rows, rows, rows)
sums = COMPILED_KERNEL.reduce_tokens(ratios, None, places, pair, run)
found = *sums, pair.tokens, pair.sums, *run.breakdowns.values()
print([hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest() for values in found])
print("numba" in sys.modules, file=sys.stderr)
"""


def reduced(folder: Path) -> tuple[str, bool]:
    """Reduce a batch in a new process. Return the bytes, and whether numba was imported."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder)}
    command = [sys.executable, "-c", REDUCED]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return done.stdout, done.stderr.strip() == "True"


@pytest.mark.process
def test_compiled_and_cached_loops_give_equal_bits(tmp_path: Path) -> None:
    first, second = reduced(tmp_path), reduced(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1  # the second process loads the code of the first
    assert (first[1], second[1]) == (True, False)
    assert first[0] == second[0]
    (tmp_path / "file").touch()
    assert reduced(tmp_path / "file") == first  # no folder for machine code


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Use an empty folder for machine code, and return a list with an entry per compilation."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kept"))
    counted, make = [], machine_code._compile

    def counting(*given: Any) -> bytes:
        counted.append(1)
        return make(*given)

    monkeypatch.setattr(machine_code, "_compile", counting)
    return counted


def unsplit() -> None:
    """Join bytes in a new compiled loop, and compare with numpy."""
    body = np.random.default_rng(0).integers(0, 256, 4000).astype(np.uint8)
    found = np.zeros(1000, np.uint32)
    assert CompiledLoop("mismatchctl.core.compiler", "join_split_bytes")(body, 0, 1000, found) == 0
    assert found.tobytes() == body.reshape(4, 1000).T.tobytes()


def test_damaged_machine_code_is_recompiled(made: list[int], tmp_path: Path) -> None:
    unsplit()
    unsplit()
    assert len(made) == 1
    (kept,) = (tmp_path / "kept").iterdir()
    whole, chance = kept.read_bytes(), random.Random(0)
    damaged = [b"", whole[:20], whole[:-1], whole + b"\0", whole[32:]]
    for place in (0, 40, *(chance.randrange(len(whole)) for _ in range(4))):
        damaged.append(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    for count, content in enumerate(damaged, 2):
        kept.write_bytes(content)
        unsplit()
        assert len(made) == count
    kept.unlink()
    os.mkfifo(kept)
    unsplit()
    assert len(made) == len(damaged) + 2


def test_machine_code_of_another_user_or_loop_is_recompiled(made: list[int], tmp_path: Path) -> None:
    unsplit()
    (kept,) = (tmp_path / "kept").iterdir()
    kept.chmod(0o666)
    unsplit()
    assert len(made) == 2
    content = kept.read_bytes()
    with pytest.raises(PermissionError):
        read_regular_file(kept, len(content), owners={os.getuid() + 1})
    levels, places = np.zeros(4, np.uint8), np.zeros(0, np.int64)
    for count in (3, 4):
        CompiledLoop("mismatchctl.core.compiler", "find_zeros")(levels, 0, 0, 0, places)
        assert len(made) == count
        (other,) = (tmp_path / "kept").glob("*.find_zeros-*")
        other.write_bytes(content)  # of another loop, whole and of the same sources


def test_own_machine_code_is_loaded_for_any_umask(made: list[int]) -> None:
    before = os.umask(0)
    try:
        unsplit()
        unsplit()
    finally:
        os.umask(before)
    assert len(made) == 1


def test_machine_code_folders_ignore_the_working_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "here")
    assert machine_code._cache_folders() == [Path(machine_code.__file__).parent / "__pycache__"]


@pytest.mark.parametrize("other", ["_compiler_environment", "source"])
def test_machine_code_of_another_machine_version_or_source_is_recompiled(
    made: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """Installations that share a folder keep their own machine code."""
    unsplit()
    with monkeypatch.context() as changed:
        if other == "source":
            source = tmp_path / "compiler.py"
            source.write_bytes(machine_code._source_path("mismatchctl.core.compiler").read_bytes() + b"#\n")
            origin = machine_code._source_path
            changed.setattr(machine_code, "_source_path", lambda name: source if "compiler" in name else origin(name))
        else:
            environment = machine_code._compiler_environment()
            changed.setattr(machine_code, "_compiler_environment", lambda: environment + b"+")
        unsplit()
        unsplit()
    assert len(made) == 2
    unsplit()
    assert len(made) == 2


def test_the_cache_key_contains_machine_and_versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import llvmlite
    import numba
    from llvmlite import binding

    reported = machine_code._compiler_environment().decode()
    versions = np.__version__, llvmlite.__version__, numba.__version__
    for part in (*versions, binding.get_host_cpu_name(), binding.get_default_triple()):
        assert part in reported
    monkeypatch.setenv("NUMBA_OPT", "0")
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".numba_config.yaml").write_text("cpu_name: z80\n")
    reported = machine_code._compiler_environment.__wrapped__().decode()
    assert "NUMBA_OPT" in reported and "z80" in reported


def test_arguments_other_than_doubles_are_refused() -> None:
    with pytest.raises(TypeError):
        machine_code._machine_words((np.float32(0.5),))


def test_disabled_numba_selects_the_plain_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_kernel(MIN_COMPILED_TOKENS) is COMPILED_KERNEL
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    assert choose_kernel(MIN_COMPILED_TOKENS) is NUMPY_KERNEL


@pytest.mark.parametrize("missing", ["_compiler_environment", "_compile", "_load_function"])
def test_numba_runs_loops_without_cached_machine_code(
    made: list[int], monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    def fail(*given: Any) -> None:
        raise AttributeError(missing)

    monkeypatch.setattr(machine_code, missing, fail)
    body, found = np.arange(40, dtype=np.uint8), np.zeros(10, np.uint32)
    CompiledLoop("mismatchctl.core.compiler", "join_split_bytes")(body, 0, 10, found)
    assert found.tobytes() == body.reshape(4, 10).T.tobytes()


def test_machine_code_without_the_loop_is_refused(made: list[int]) -> None:
    given = np.zeros(4, np.uint8), 0, 1, np.zeros(1, np.uint32)
    code = machine_code._compile(vars(compiler)["join_split_bytes"], given).partition(b"\n")[2]
    with pytest.raises(LookupError, match="another"):
        machine_code._load_function(b"another\n" + code, given)


def test_a_signal_swallowed_by_the_compiler_ends_the_command(made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def dropping(*given: Any) -> None:
        process._received_signals.append(2)
        raise RuntimeError("no code came of it")

    monkeypatch.setattr(process, "_received_signals", [])
    monkeypatch.setattr(machine_code, "_compile", dropping)
    with pytest.raises(KeyboardInterrupt):
        unsplit()


def test_machine_code_with_numba_symbols_is_refused() -> None:
    from mismatchctl.core.compiler import compile_loop

    @compile_loop
    def first_gamma(values: Any) -> int:
        return int(math.gamma(values[0]))

    with pytest.raises(LookupError, match="gamma"):
        machine_code._compile(first_gamma, (np.zeros(3),))
