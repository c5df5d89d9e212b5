"""Files of a model: where they lie, whether they are whole, and the tensors in safetensors and pickles.

Every format in this folder is a mapping from tensor names to entries. An `Entry` is one tensor on disk whose shape and
dtype are known and whose values are not read yet, so a model is loaded one tensor at a time. Reading is strict. A
damaged, missing, unexpected or non-finite tensor is a ValueError of one line, and no pickle can run code.
"""

import hashlib
import json
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from support.errors import BadFileError
from support.files import read_json, read_text, write_json, written_whole
from support.reader import INDEX_LIMIT, check, refusal

Progress = Callable[[int, int, str], None]  # called with (done, total, name of the tensor or layer)
Shapes = Mapping[str, tuple[int, ...]]
Dtypes = Mapping[str, torch.dtype]
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
# The dtypes of a safetensors header.
KINDS = dict(zip("F64 F32 F16 BF16 I64 I32 I16 I8 U8 BOOL".split(), FLOATS + INTEGERS, strict=True))
LARGEST = 2.0**20  # of a weight. Trained ones stay far below it, and a damaged exponent goes beyond it.
# Old exporters stored these buffers. They follow from the config, so they are the only tensors that may stay unused.
IGNORED = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)|rope\.freqs")

# What torch.compile and training on several devices put into names.
WRAPPERS = r"\b(_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."


class Spans(NamedTuple):
    """A part of a tensor: pieces of it along one axis, each from its first index to the one after its last."""

    axis: int
    pieces: tuple[tuple[int, int], ...]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this part of a tensor of that shape."""
        size = sum(end - first for first, end in self.pieces)
        return *whole[: self.axis], size, *whole[self.axis + 1 :]

    def __call__(self, tensor: Tensor) -> Tensor:
        parts = [tensor.narrow(self.axis, first, end - first) for first, end in self.pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.axis)


class Entry(NamedTuple):
    """One tensor on disk. `read()` brings its values to the CPU. dtype is a str where torch has no such dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    file: str
    read: Callable[[], Tensor]
    # Reads a part. None where `read` only maps the file, so that what is cut off its result is not read.
    part: Callable[[Spans], Tensor] | None = None


Entries = Mapping[str, Entry]


class Destination(NamedTuple):
    """Where loaded tensors go. Floats are cast to `dtype`, and `progress` is called after each tensor."""

    device: torch.device | str
    dtype: torch.dtype
    progress: Progress


def safetensors_parts(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """A safetensors file, part by part. Tensors may be views on any device. At most one of them is copied at a time.

    `safetensors.torch.save` keeps a type in memory for every new number of bytes, which a server would do for ever.
    """
    kinds = {dtype: kind for kind, dtype in KINDS.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    # Wide dtypes come first, so that every tensor starts at a multiple of its element size.
    order = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    end = 0
    for name, t in order:
        start, end = end, end + t.numel() * t.element_size()
        header[name] = {"dtype": kinds[t.dtype], "shape": list(t.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, t in order:
        flat = t.detach().cpu().contiguous().reshape(-1)
        yield memoryview(flat.view(torch.uint8).numpy())


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file whole."""
    with written_whole(path) as part, open(part, "wb") as out:
        out.writelines(safetensors_parts(tensors))


def write_directory(directory: str | Path, tensors: Mapping[str, Tensor], config: dict[str, Any]) -> None:
    """Write `model.safetensors` and `config.json`. Each file is written whole, with memory for one tensor only."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(directory / "model.safetensors", tensors)
    write_json(directory / "config.json", config)


def read_entries(files: Iterable[Path], share: tuple[int, int] = (0, 1)) -> dict[str, Entry]:
    """All tensors of `.safetensors`, `.bin` and `.pth` files, unread, without WRAPPERS. ValueError for a name twice.

    share: see `pickle_entries`.
    """
    entries: dict[str, Entry] = {}
    for path in files:
        added = _safetensors_entries(path) if path.suffix == ".safetensors" else pickle_entries(path, share)
        for name, entry in added.items():
            name = re.sub(WRAPPERS, "", name)
            if name in entries:
                raise ValueError(f"{path}: {few_names([name])} is also in {entries[name].file}; remove one.")
            entries[name] = entry
    return entries


def _safetensors_entries(path: Path) -> dict[str, Entry]:
    from safetensors import SafetensorError, safe_open  # random weights do without

    try:  # the library checks that sizes, offsets and shapes agree
        handle = safe_open(path, framework="pt", device="cpu")
        tensors = {name: handle.get_slice(name) for name in handle.keys()}
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error}).") from error
    except SafetensorError as error:
        problem = f"cut short or not a safetensors file ({error})."
        raise refusal(path, problem, "Download it again.") from error
    entries = {}
    for name, tensor in tensors.items():
        kind = tensor.get_dtype()
        read = partial(handle.get_tensor, name)
        entries[name] = Entry(tuple(tensor.get_shape()), KINDS.get(kind, kind), path.name, read)
    return entries


def pickle_entries(path: Path, share: tuple[int, int] | None = (0, 1)) -> dict[str, Entry]:
    """The tensors of a pickle file, which may hold nothing but a dictionary of names and dense tensors.

    share: (i, n) reads the i-th of n shares of the file and compares it with the checksums that the format since torch
    1.6 has inside. n processes that read a file together so read it once. None compares nothing.
    """
    if [int(n) for n in torch.__version__.split(".")[:2]] < [2, 10]:
        why = f"pickle files need torch 2.10 or newer (CVE-2026-24747), this is {torch.__version__}"
        raise ValueError(f"{path}: {why}. Convert it to safetensors elsewhere.")
    try:
        with open(path, "rb") as file:
            mapped = file.read(2) == b"PK"  # the format before torch 1.6 cannot be mapped
        with warnings.catch_warnings(action="ignore"):  # about old protocols
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # an untrusted pickle can make torch.load raise anything
        reason = f"not a plain tensor file ({_pickle_reason(error)})"
        raise ValueError(f"{path}: refused, {reason}. Get the model as safetensors.") from error
    if mapped and share and (record := _damaged_record(path, *share)):
        raise refusal(path, f"the checksum of {record!r:.80} in it is wrong.", "Damaged; download it again.")
    for key in ("state_dict", "model_state_dict"):  # beside what only its training needs
        if isinstance(value, dict) and isinstance(value.get(key), dict):
            value = value[key]
    entries: dict[str, Entry] = {}
    for name, t in value.items() if isinstance(value, dict) else [("", None)]:
        dense = isinstance(t, Tensor) and t.layout is torch.strided and t.device.type == "cpu"
        if not (dense and isinstance(name, str)):
            inner = f" under {name!r:.60}" if isinstance(t, dict) else ""
            raise ValueError(f"{path}: refused, not a dictionary of names and dense tensors{inner}.")
        entries[name] = Entry(tuple(t.shape), t.dtype, path.name, t.detach)
    return entries


def _damaged_record(path: Path, share: int, shares: int) -> str | None:
    """A record in one share of a torch file whose CRC-32 is not that of its bytes. torch itself does not compare them."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = sorted(archive.infolist(), key=lambda record: record.file_size)
            archive.filelist = records[share::shares]  # those that testzip reads
            return archive.testzip()
    except Exception as error:  # zipfile raises many kinds for a damaged archive
        return f"the archive ({error})"


def _pickle_reason(error: Exception) -> str:
    """What is wrong with a pickle: the code that it asks for, or torch's reason without torch's unsafe advice."""
    text = " ".join(str(error).split())
    if match := re.search(r"[Uu]nsupported (?:global: )?GLOBAL (\S+)", text):
        return f"Unsupported global: {match[1][:120]!r}, code that loading would run"
    text = text.split("WeightsUnpickler error:")[-1].split("Check the documentation")[0].strip()
    text = "".join(c if c.isprintable() else "?" for c in text[:160]) or "damaged"
    return f"{type(error).__name__}: {text}"


def tensor_files(directory: Path) -> list[Path]:
    """The weight files of a directory: those that a shard index names, or else all of one kind. [] without any.

    Safetensors are preferred to pickles. Raises ValueError for an index that is damaged or names a missing file.
    """
    for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        index = directory / f"{stem}{suffix}.index.json"
        if index.exists():
            shards = check(read_json(index, INDEX_LIMIT), {"weight_map": {"*": str}}, index, "the index")["weight_map"]
            if not shards:
                raise ValueError(f"{index}: weight_map must name at least one tensor.")
            for name in shards.values():
                if not (re.fullmatch(r"\w[\w.-]*", name) and name.endswith(suffix) and len(name) <= 255):
                    raise ValueError(f"{index}: shard name {name!r:.80} is not a plain {suffix} file name.")
                if not (directory / name).is_file():
                    raise ValueError(f"{directory / name} is missing, the index names it. Download it again.")
            return [directory / name for name in sorted(set(shards.values()))]
        if files := sorted(directory.glob(f"{stem}*{suffix}")):
            return files
    return []


def check_entries(expected: Shapes, entries: Entries, where: str, dtypes: Dtypes | None = None) -> None:
    """Raise a one-line ValueError unless `entries` holds exactly the expected names with the expected shapes.

    `dtypes` are the exact dtypes of the tensors that it names. All others must be floats of 16 to 64 bits.
    """
    if missing := expected.keys() - entries.keys():
        hint = " (tie_word_embeddings not set?)" if "lm_head.weight" in missing else ""
        advice = "Is a shard missing? Download it again, or quantize the original again."
        raise ValueError(f"{where}: missing {few_names(missing)}{hint}. {advice}")
    if extra := [name for name in entries.keys() - expected.keys() if not IGNORED.fullmatch(name)]:
        raise ValueError(f"{where}: unexpected {few_names(extra)}; config.json describes another model.")
    for name, shape in expected.items():
        entry, wanted = entries[name], (dtypes or {}).get(name)
        if entry.shape != shape or (entry.dtype not in FLOATS if wanted is None else entry.dtype != wanted):
            wanted = f"{wanted or 'a float of 16 to 64 bits'} {list(shape)}"
            problem = f"{name} is {entry.dtype} {list(entry.shape)[:9]}, expected {wanted}"
            raise refusal(where, f"{problem}; {entry.file} and config.json do not belong together.")


def few_names(names: Iterable[str]) -> str:
    """A few tensor names, safe to print on one line."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return f"tensor {', '.join(repr(name)[:120] for name in ordered[:3])}{more}"


def check_finite(tensor: Tensor, name: str, file: str) -> None:
    """Raise a ValueError if a float tensor holds NaN, infinity or values above LARGEST. One pass without a copy.

    The host waits for the device.
    """
    if tensor.numel() and not (torch.stack(torch.aminmax(tensor)).double().abs() <= LARGEST).all():
        kind = str(tensor.dtype).removeprefix("torch.")
        text = f"{name:.120} holds NaN or infinite values, or some above 2^20 (as {kind})."
        raise refusal(file, text, "Damaged file?")


REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)  # one slash, and no part that starts with a dot
COMMIT = re.compile(r"[0-9a-f]{8,64}")


SHIPPED = (("demo",), ("heads",))  # folders that come with the code, in the repository and in the installed package
PACKAGE = Path(__file__).resolve().parent.parent


def cache_folder() -> Path:
    """The folder in which the hub's own client keeps what it downloads."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def local_path(name: str | Path) -> Path:
    """`name` as a path. Where nothing is there, it may begin with one of SHIPPED, which are in the package, too.

    If it reads like `org/name`, it is the snapshot that the cache has of `main`. Raises BadFileError in one line for what
    is in none of these places.
    """
    path, text = Path(name), os.fspath(name)
    if path.parts[:1] in SHIPPED and not path.exists():
        path = PACKAGE / path
        if not path.exists():
            raise BadFileError(f"{text} is no path here, and not in {PACKAGE} (in Python: eaglet.DEMO.parent).")
    if not REPO.fullmatch(text) or "--" in text or path.exists():  # the cache writes a slash as --
        return path
    download = f"hf download {text} fetches it (pip install huggingface_hub)."
    cache = cache_folder()
    folder = cache / f"models--{text.replace('/', '--')}"
    if not folder.is_dir():
        raise BadFileError(f"{text} is no path here, and not in the Hugging Face cache ({cache}). {download}")
    try:
        commit = (folder / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        commit = ""
    snapshot = folder / "snapshots" / commit
    if not COMMIT.fullmatch(commit) or not snapshot.is_dir():
        problem = f"is not whole in the Hugging Face cache: {folder} has no snapshot of main."
        raise BadFileError(f"{text} {problem} {download}")
    return snapshot


SUMS = "SHA256SUMS"  # what `sha256sum * > SHA256SUMS` writes
DIGEST = re.compile("[0-9a-fA-F]{64}")
LINE = re.compile(r"([0-9a-fA-F]{64}) [ *]([\w.][\w.-]*)")


def check_sha256(model: Path, wanted: str) -> None:
    """Compare the files of a model, a folder or a GGUF file, with their digests. Every byte of them is read.

    wanted: the digest of the one file with weights, or `stored` for those in SHA256SUMS beside it. Raises ValueError in
    one line for a file that differs, and for a file with weights that is not listed.
    """
    folder = model if model.is_dir() else model.parent
    weights = [model] if model.is_file() else tensor_files(model) or sorted(model.glob("consolidated.*.pth"))
    if wanted == "stored":
        digests = {}
        for number, line in enumerate(read_text(folder / SUMS).splitlines(), 1):
            if not line.strip():
                continue
            if not (match := LINE.fullmatch(line)):
                raise refusal(folder / SUMS, f"line {number} is not a digest and the name of a file beside it.")
            digests[match[2]] = match[1]
        if missing := [file.name for file in weights if file.name not in digests]:
            raise refusal(folder / SUMS, f"{missing[0]} is not in it.", "Run sha256sum on all files of the model.")
        files = weights if model.is_file() else [folder / name for name in digests]
    elif not DIGEST.fullmatch(wanted) or len(weights) != 1:
        problem = f"{wanted!r:.80} is neither `stored` nor 64 hexadecimal digits"
        if DIGEST.fullmatch(wanted):
            problem = f"{len(weights)} files with weights need `stored`"
        raise ValueError(f"--sha256: {problem}. List the digests in {SUMS} and pass `stored`.")
    else:
        files, digests = weights, {weights[0].name: wanted}
    for file in files:
        try:
            with open(file, "rb") as data:
                digest = hashlib.file_digest(data, "sha256").hexdigest()
        except OSError as error:
            raise refusal(file, f"cannot be read ({error.strerror}).") from error
        if digest != digests[file.name].lower():
            raise refusal(file, f"its sha256 is {digest}, expected {digests[file.name]}.", "Download it again.")
