"""The recorder: queue columns, write complete files in a thread, and handle write errors."""

from __future__ import annotations

import atexit
import logging
import operator
import os
import queue
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import pyarrow as pa

from mismatchctl.recorder.files import open_new_file, remove_stale_files, write_arrow, write_parquet
from mismatchctl.recorder.table import build_table

log = logging.getLogger("mismatchctl.recorder")


class Recorder:
    """Writes dumps into a folder. A file gets its name only when it is complete; nothing is ever overwritten.

    A file is called `step_00003.parquet` after its first step, `step_00003_rank00001.parquet` on a rank; a
    further one of the same name adds `_001`, `_002`, ... Any number of processes may write into one folder, and any
    number of threads through one recorder. After a fork the child's recorder begins anew: what waits is the parent's.

    Attributes:
        lost: calls of `write` whose rows did not and will not reach the disk.

    Args:
        folder: where the files go; made when the first one is written.
        run: the `run` column of every row; without, the path given to mismatchctl names the run.
        rank: part of the file names; default: the environment's RANK, as torchrun sets it.
        format: "parquet", or "arrow" for Arrow IPC files (lz4), larger and quicker to read.
        file_bytes: rows wait in memory until they make up this many bytes before compression, then become a
            file; 0 makes a file of each write.
        background: how many writes may wait for a thread that compresses and writes them; one more waits
            in `write` until there is room, none is dropped. 0: no thread, `write` returns when its file is complete.
        on_error: "raise", or "warn": never stop the training, log one warning and count in `lost`.

    Raises:
        ValueError: an argument out of its range.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        run: str | None = None,
        rank: int | None = None,
        format: Literal["parquet", "arrow"] = "parquet",
        file_bytes: int = 0,
        background: int = 0,
        on_error: Literal["raise", "warn"] = "raise",
    ) -> None:
        if format not in ("parquet", "arrow"):
            raise ValueError(f"format: expected 'parquet' or 'arrow', got {format!r}")
        if on_error not in ("raise", "warn"):
            raise ValueError(f"on_error: expected 'raise' or 'warn', got {on_error!r}")
        if rank is None and os.environ.get("RANK", "").isdecimal():
            rank = int(os.environ["RANK"])
        if "://" in os.fspath(folder):
            raise ValueError(f"folder: {folder} is no folder of a disk; upload its files once they are there")
        for name, number in {"rank": rank or 0, "file_bytes": file_bytes, "background": background}.items():
            if number < 0:
                raise ValueError(f"{name}: {number} is negative")
        self.folder, self.run, self.rank, self.format = Path(folder), run, rank, format
        self.file_bytes, self.background, self.on_error, self.lost = file_bytes, background, on_error, 0
        self._files: Counter[int] = Counter()
        self._closed = self._warned = False
        self._begin()
        atexit.register(self.close)

    def _begin(self) -> None:
        """Everything that belongs to one process."""
        self._process = os.getpid()
        self._waiting: list[pa.Table] = []
        self._failure: OSError | None = None
        self._lock = threading.Lock()  # of what is known of losses, and of the thread
        self._saving = threading.RLock()  # of what waits, and of the disk
        self._queue: queue.Queue[pa.Table | None] = queue.Queue(self.background)
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except OSError:
            if error is None:  # else what ended the block is what there is to know
                raise

    def close(self) -> None:
        """Write what waits, and refuse further writes; at the latest the end of the process does so.

        Raises:
            OSError: something could not be written, now or in the background since the last `write`.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._process != os.getpid():
            return
        if self._thread is None:
            self._flush()
        else:
            self._queue.put(None)
            self._thread.join()
            self._raise_failure()

    def write(
        self, *, step: int, rollout_log_probs: Any, train_log_probs: Any, response_mask: Any = None, **optional: Any
    ) -> Path | None:
        """Record B sequences; everything is copied before the call returns.

        A per-token column is padded [B, T] (numpy, or torch on any device), a nested tensor, or a list of B
        one-dimensional tensors, arrays or lists. A padded `response_mask` says where the responses lie: each row is
        kept from its first to its last valid token, holes included, and another column may be padded alike or have
        those tokens alone. With a list of masks, or without, rows are kept whole. Experts have further dimensions
        for layers and choices, [B, T, k] or [B, T, layers, k], and so have the k most likely tokens, [B, T, k].
        `prompt_token_ids` is a list of B rows of any length. A per-sequence column is a list or array of B numbers,
        booleans or strings, or one value for all. Floats of less than 32 bits are stored exactly in 32.

        Args:
            step: the training step, a whole number of any kind.
            rollout_log_probs: per token, nats, as the inference engine reported them.
            train_log_probs: per token, nats, the trainer's recomputation with the weights that sampled.
            response_mask: per token, 1 where the policy sampled; as the loss is given it, before any rejection.
            optional: any further column of docs/contract.md, or a per-sequence one of your own for `--by`; None
                leaves it out.

        Returns:
            The file that this call completed; None where rows wait or there were none.

        Raises:
            ValueError: columns that do not fit together; nothing of the call is kept.
            OSError: a file could not be written; its rows are lost. With a thread: one since the last call.
        """
        if self._process != os.getpid():
            self._begin()
        try:
            if self._closed:
                raise ValueError("the recorder is closed")
            columns = {"step": _parse_step(step), "run": self.run, **optional, "response_mask": response_mask}
            columns |= {"rollout_log_probs": rollout_log_probs, "train_log_probs": train_log_probs}
            table = build_table({name: value for name, value in columns.items() if value is not None})
        except Exception as error:
            self._lose(error, 1)
            return None
        if len(table) == 0:
            return None
        if not self.background:
            return self._save(table)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._drain, name="recorder", daemon=True)
                self._thread.start()
        self._queue.put(table)
        self._raise_failure()
        return None

    def _drain(self) -> None:
        """What the thread does: files of the tables in the queue, until None ends it."""
        while True:
            table = self._queue.get()
            try:
                self._flush() if table is None else self._save(table)
            except OSError as error:
                with self._lock:
                    self._failure = self._failure or error
            if table is None:
                return

    def _raise_failure(self) -> None:
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _lose(self, error: Exception, writes: int) -> None:
        """Count what an error cost, and raise it or warn of the first one."""
        with self._lock:
            self.lost += writes
            first, self._warned = not self._warned, True
        if self.on_error == "raise":
            raise error
        if first:  # logged, since a warning can be made an error
            what = f"{type(error).__name__}: {error}"
            log.warning("not recorded: %s (training goes on; Recorder.lost counts this and further losses)", what)

    def _save(self, table: pa.Table) -> Path | None:
        """Let the table wait for its file; returns the file that is thereby complete."""
        done = None
        with self._saving:
            if self._waiting and not table.schema.equals(self._waiting[0].schema, check_metadata=True):
                done = self._flush(then=[table])
            else:
                self._waiting.append(table)
            return self._flush() if sum(waiting.nbytes for waiting in self._waiting) >= self.file_bytes else done

    def _flush(self, then: Sequence[pa.Table] = ()) -> Path | None:
        """Make a file of the tables that wait; whatever comes of it, `then` wait next."""
        tables, self._waiting = self._waiting, list(then)
        if not tables:
            return None
        try:
            return self._publish(pa.concat_tables(tables).combine_chunks())
        except Exception as error:
            number, why = getattr(error, "errno", None), getattr(error, "strerror", None) or error
            text = f"{self.folder}: cannot be written, {len(tables)} call(s) of write are lost: {why}"
            problem = OSError(number, text) if number else OSError(text)
            problem.__cause__ = error
            self._lose(problem, len(tables))
            return None

    def _publish(self, table: pa.Table) -> Path:
        """Write the table under a temporary name beside its final one, then rename it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        step = table["step"][0].as_py()
        if not self._files:
            remove_stale_files(self.folder, self.rank)
        stem = f"step_{step:05d}" if self.rank is None else f"step_{step:05d}_rank{self.rank:05d}"
        with open_new_file(self.folder, stem, self.format, self._files[step]) as (final, handle):
            write_parquet(table, handle) if self.format == "parquet" else write_arrow(table, handle)
        self._files[step] += 1
        return final


def _parse_step(step: Any) -> int:
    try:
        whole = operator.index(step)
    except TypeError:
        raise ValueError(f"step: needs a whole number, got {step!r}") from None
    if not 0 <= whole < 2**63:
        raise ValueError(f"step: {whole} is {'negative' if whole < 0 else 'too large'}")
    return whole
