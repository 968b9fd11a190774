"""The files on disk while a job runs, from which it goes on after a kill.

    OUT.score.json     settings of the job, sizes and times of its input files; written first, stays; has the digest
                       of OUT from just before OUT appears
    OUT.parts/         one file per finished part
    OUT.rejects.jsonl  records that were rejected, if any; appears before OUT
    OUT                appears when all parts are finished; the parts are then removed

The name of a part ends in a digest of its records, so that a part whose records have changed since is not found. Its
first line is a digest of its name and its results, so that one which was changed, cut off or put in another's place
does not go into the output.

Every file is written under another name, flushed to disk and renamed, so that it appears as a whole or not at all.
After a kill these files say how far the job came: there is no other state.

Files that a job did not write are never removed: it refuses to begin where one lies in its way.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logitless.errors import LogitlessError
from logitless.tools.score.files import REJECTED, are_rejects, count_results, write_rejects, write_results

PART = re.compile(r"\d{8,}(-[0-9a-f]{16})?\.jsonl")
DRAFT = re.compile(r".+\.\d+\.draft")
"""Names of the files in ``OUT.parts``."""

DIGEST = "output_sha256"
"""Field of the sheet that is no setting."""


@dataclass(frozen=True)
class Journal:
    """The state of one job.

    Attributes:
        settings: all that decides about the results.
        digests: one of the records of each part; none where the input is Parquet.
    """

    out: Path
    settings: dict[str, Any]
    num_records: int
    part_size: int
    digests: tuple[str, ...] = ()

    @property
    def sheet(self) -> Path:
        return _beside(self.out, "score.json")

    @property
    def folder(self) -> Path:
        return _beside(self.out, "parts")

    @property
    def rejects(self) -> Path:
        return _beside(self.out, "rejects.jsonl")

    @property
    def num_rejects(self) -> int:
        """Records that a finished job rejected."""
        return count_results(self.rejects) if self.rejects.exists() else 0

    @property
    def num_parts(self) -> int:
        return -(-self.num_records // self.part_size)

    @property
    def finished(self) -> bool:
        return self.out.exists()

    def open(self, *, overwrite: bool) -> None:
        """Begin, or go on where an earlier run with the same settings stopped.

        Raises:
            LogitlessError: the output exists and was made with other settings, or nobody knows how; or a file that no
                job wrote lies where this one would write.
        """
        with named_file(self.out):
            if overwrite or not self.finished:
                self._check_strangers()
            if overwrite:
                # The old sheet goes last: until then it describes the files that are left.
                self.out.unlink(missing_ok=True)
                self.rejects.unlink(missing_ok=True)
                self._clear()
                self.sheet.unlink(missing_ok=True)
            fresh = not self.sheet.exists()
            if not fresh:
                fresh = self._check_settings()
            elif self.out.exists():
                raise LogitlessError(
                    f"score: {self.out} exists, and no {self.sheet.name} says how it was made. Give another --out, or "
                    f"--overwrite to replace it."
                )
            self.folder.mkdir(parents=True, exist_ok=True)
            if fresh:
                self._write_sheet(self.settings)
            if self.finished:
                self._check_output()
                self._clear()

    def has(self, part: int) -> bool:
        return self._part(part).exists()

    def size_of(self, part: int) -> int:
        return min(self.part_size, self.num_records - part * self.part_size)

    def commit(self, part: int, lines: list[bytes]) -> None:
        """Write the results of a part to its file."""
        assert len(lines) == self.size_of(part), f"part {part} has {len(lines)} lines"
        place, results = self._part(part), b"".join(lines)
        self._commit(place, lambda path: path.write_bytes(_seal(place, results) + results))

    def finish(self) -> None:
        """Write all parts, in order, to the output, and remove them."""
        with named_file(self.out):
            # A job may take days, in which others write files.
            self._check_rejects()
            if any(line.startswith(REJECTED) for line in self._lines()):
                self._commit(self.rejects, lambda path: write_rejects(self._lines(), path))
            else:
                self.rejects.unlink(missing_ok=True)
            self._commit(self.out, self._write_output)
        with suppress(OSError):
            self._clear()

    def _write_output(self, path: Path) -> None:
        """Write the output to its draft, and note its digest: an output that is there then has one in the sheet."""
        write_results(self._lines, path, self.out.suffix)
        noted = {**self.settings, DIGEST: _file_digest(path)}
        # A kill after this leaves the sheet as it should be, and no need to write it again.
        if not self.sheet.exists() or self._read_sheet() != json.loads(json.dumps(noted)):
            self._write_sheet(noted)

    def _write_sheet(self, fields: dict[str, Any]) -> None:
        text = json.dumps(fields, indent=1) + "\n"
        self._commit(self.sheet, lambda path: path.write_text(text))

    def _clear(self) -> None:
        """Remove parts and drafts, and their folder unless something else lies in it."""
        for path in self.folder.glob("*"):
            if _is_own(path):
                path.unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()

    def _check_strangers(self) -> None:
        """Raise where a file that is to be removed or replaced is none that a job wrote."""
        others = sorted(path.name for path in self.folder.glob("*") if not _is_own(path))
        if others:
            raise LogitlessError(
                f"score: {self.folder} holds {', '.join(others[:3])}{', ...' if len(others) > 3 else ''}, which no job "
                f"wrote: this is the folder of its parts, and is removed in the end. Move what is yours, or give "
                f"another --out."
            )
        if not self.sheet.exists() and any(self.folder.glob("*.jsonl")):
            raise LogitlessError(
                f"score: {self.folder} exists, and no {self.sheet.name} says how it was made. Move or delete it, or "
                f"give another --out."
            )
        self._check_rejects()

    def _check_rejects(self) -> None:
        """Raise where the file of rejected records is none that a job wrote."""
        known = self.sheet.exists()
        if self.rejects.exists() and not (known and are_rejects(self.rejects)):
            why = "holds lines that no job wrote" if known else f"exists, and no {self.sheet.name} says who wrote it"
            raise LogitlessError(
                f"score: {self.rejects} {why}: rejected records go there, and it would be replaced. Move or delete it, "
                f"or give another --out."
            )

    def _commit(self, path: Path, write: Callable[[Path], object]) -> None:
        """Make ``path`` appear with all that ``write`` writes, or not at all."""
        # The number of the process keeps drafts of two jobs apart that were started by mistake.
        draft = self.folder / f"{path.name}.{os.getpid()}.draft"
        with named_file(path):
            try:
                write(draft)
                _flush(draft)
                os.replace(draft, path)
                _flush(path.parent)
            except OSError:
                # A draft that a full disk has cut off is of no use.
                draft.unlink(missing_ok=True)
                raise

    def _part(self, part: int) -> Path:
        return self.folder / f"{part:08d}{f'-{self.digests[part]}' if self.digests else ''}.jsonl"

    def _lines(self) -> Iterator[bytes]:
        for part in range(self.num_parts):
            place = self._part(part)
            # A part is held in memory when it is written, too.
            seal, end, results = place.read_bytes().partition(b"\n")
            if seal + end != _seal(place, results):
                raise LogitlessError(
                    f"score: {place} does not have the digest in its first line: it was changed after it was written, "
                    f"or the disk lost some of it. Delete it and run again."
                )
            yield from results.splitlines(keepends=True)

    def _check_output(self) -> None:
        """Raise where the output is not whole, as a kill cannot leave it."""
        count, rejects = count_results(self.out), self.num_rejects
        if count + rejects != self.num_records:
            without = f", {rejects} of them rejected" if rejects else ""
            raise LogitlessError(
                f"score: {self.out} holds {count} whole results but the input has {self.num_records} records{without}. "
                f"It was changed after it was written, or the disk lost its end: delete it and run again, or "
                f"--overwrite."
            )
        # Sheets of earlier versions have no digest.
        if (noted := self._read_sheet().get(DIGEST)) is not None and noted != _file_digest(self.out):
            raise LogitlessError(
                f"score: {self.out} does not have the digest that {self.sheet.name} noted of it: it was changed after "
                f"it was written. Delete it and run again, or --overwrite."
            )

    def _read_sheet(self) -> dict[str, Any]:
        try:
            before = json.loads(self.sheet.read_bytes())
        except (ValueError, RecursionError):
            raise LogitlessError(
                f"score: {self.sheet} is no JSON: it was changed after it was written, or the disk lost its end. "
                f"--overwrite starts anew."
            ) from None
        if not isinstance(before, dict):
            raise LogitlessError(
                f"score: {self.sheet} holds no settings of a job but a {type(before).__name__}: it is another file. "
                f"Give another --out, or --overwrite to replace it."
            )
        return before

    def _check_settings(self) -> bool:
        """Raise where the settings are others; True where the sheet is to be written anew, for a repaired input."""
        before, wanted = self._read_sheet(), json.loads(json.dumps(self.settings))
        before.pop(DIGEST, None)
        other = [name for name in {**before, **wanted} if before.get(name) != wanted.get(name)]
        if other == ["input"] and self._is_repaired(before.get("input"), wanted["input"]):
            return True
        if other:
            raise LogitlessError(
                f"score: {self.out} was begun with other settings: "
                f"{'; '.join(_difference(name, before.get(name), wanted.get(name)) for name in other)}. Give another "
                f"--out, or --overwrite to start anew."
            )
        return False

    def _is_repaired(self, before: Any, now: dict[str, Any]) -> bool:
        """Whether the input is a file of the same name with records changed, and some finished parts still hold."""
        same = isinstance(before, dict) and list(before) == list(now)
        if self.finished or not self.digests or not same:
            return False
        return any(map(self.has, range(self.num_parts))) or not any(self.folder.glob("*.jsonl"))


@contextmanager
def named_file(path: Path) -> Iterator[None]:
    """Errors of the operating system become a LogitlessError that names the file and what to do."""
    try:
        yield
    except FileNotFoundError as error:
        raise LogitlessError(
            f"score: {error.filename or path} is gone. Does another process write to the same --out, or has it "
            f"finished? Give each its own --out; this command, run again, goes on from what is there."
        ) from None
    except OSError as error:
        raise LogitlessError(
            f"score: {path}: {error.strerror or error}. Finished parts are kept: the same command goes on from them "
            f"once that is mended."
        ) from None


def check_apart(data: Path, model: Path, out: Path) -> None:
    """Raise where the input is the output, or input or model a file that a job writes beside it, however spelled."""
    for argument, path in {"the input": data, "the model": model, "--out": _beside(out, LONGEST)}.items():
        _check_name(argument, path)
    if _same(data, out):
        raise LogitlessError(
            f"score: --out {out} is the input {data} itself, which it would replace. Give another --out."
        )
    parts = _beside(out, "parts").resolve()
    if _same(data, _beside(out, "rejects.jsonl")) or data.resolve().is_relative_to(parts):
        raise LogitlessError(
            f"score: the input {data} is a file that this job writes beside {out}, and deletes with --overwrite. Move "
            f"it, or give another --out."
        )
    if model.resolve().is_relative_to(parts):
        raise LogitlessError(
            f"score: the model {model} lies in {_beside(out, 'parts')}, the folder of this job's parts, which is "
            f"removed in the end. Move it, or give another --out."
        )


def _check_name(argument: str, path: Path) -> None:
    """Raise for a path that the system will not look up: too long, in a folder that may not be read."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        name = str(path).removesuffix(f".{LONGEST}")
        reason = getattr(error, "strerror", None) or error
        more = f" Files beside it have names of {len(LONGEST) + 1} letters more." if name != str(path) else ""
        raise LogitlessError(f"score: {argument} {name}: {reason}. Give a shorter one, or another.{more}") from None


LONGEST = "rejects.jsonl.4194304.draft"
"""The longest ending of a file that a job writes: a draft, by the largest number of a process."""


def _same(a: Path, b: Path) -> bool:
    """Whether two paths, links included, lead to one file."""
    return a.samefile(b) if a.exists() and b.exists() else a.resolve() == b.resolve()


def _beside(out: Path, ending: str) -> Path:
    return out.with_name(f"{out.name}.{ending}")


def _is_own(path: Path) -> bool:
    """Whether something in the folder of parts has the name of a part or a draft."""
    return bool(PART.fullmatch(path.name) or DRAFT.fullmatch(path.name)) and not path.is_dir()


def _seal(place: Path, results: bytes) -> bytes:
    """First line of a part."""
    return f"sha256 {hashlib.sha256(place.name.encode() + results).hexdigest()}\n".encode()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


MODEL_FILES = (".safetensors", ".json", ".model", ".txt", ".tiktoken", ".jinja")


def facts(path: Path) -> dict[str, list[int]]:
    """Size and time of change of a file, or of a model's files, to notice changes."""
    files = [path]
    if path.is_dir():
        # Inputs and results may lie in the model's folder.
        own = (".score.json", ".mismatch.json")
        others = (file for file in path.iterdir() if not file.name.endswith(own))
        files = sorted(file for file in others if file.suffix in MODEL_FILES)
    return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}


def _difference(name: str, before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        changed = [file for file in {**before, **now} if before.get(file) != now.get(file)]
        return f"the {name} has changed ({', '.join(changed[:3])}{', ...' if len(changed) > 3 else ''})"
    return f"{name} was {before!r} and is {now!r}"


def _flush(path: Path) -> None:
    """Flush to disk: after a power cut a renamed file must not be empty."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
