"""Change a tritonserver's binary where one small request could crash it and no option helps.

Standard library only: it runs before anything is installed (`python harden.py BINARY`).
"""

from __future__ import annotations

import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

# ELF of 64 bits, little-endian: offsets of the section table's place and size; size of a section.
_SECTIONS_AT, _NUM_SECTIONS_AT, _SECTION_BYTES = 40, 60, 64
_DYNAMIC_SYMBOLS, _SYMBOL_BYTES = 11, 24
# Messages of tritonserver that would be wrong -> true ones of the same length.
_REFUSALS = {
    b"encountered inconsistent stream state during decompression": (
        b"Content-Encoding must be identity: no body is decompressed"
    ),
    b"Unexpected error decompressing data for algorithm ": (
        b"Compressed messages are refused: grpc-encoding is "
    ),
}
_TERMINATED = b"Terminate parsing due to Handler error."
_TOO_DEEP = b"The JSON is nested too deeply to parse."
MAX_STACK = 64 << 20  # bytes of a thread's stack in use, above which no JSON value is parsed
# The server that `make install` installs (Triton 2.51): rapidjson's `ParseValue`, which
# calls itself for each bracket, has three pushes behind its first instruction (endbr64).
_BUILD = bytes.fromhex("a916d4ee7823ea3c17b3789d705e3b4455dacfc5")
_PARSE_VALUE, _PUSHES = 0x1CF044, bytes.fromhex("415741564155")
_UNUSED = 0xAA8C40  # zeros after the code, in its last page


class HardenError(Exception):
    """The binary is not one that this file knows; the message is one line."""


def refuse_compression(data: bytes) -> bytes:
    """Make a tritonserver refuse compressed requests, HTTP and gRPC, before it inflates them.

    300 kB of gzip inflate to 300 MB in the thread that all HTTP streams share. Before Triton 26.01
    nothing limits that, 24.10 never frees what it then cannot parse, and no version limits gRPC.
    So the symbol by which the binary imports `inflate` from zlib is renamed to `deflate`, which
    refuses a stream that was opened for inflating. Raises HardenError if the binary does not
    import both by name.
    """
    if refuses_compression(data):
        return data
    symbols = _dynamic_symbols(data)
    inflate, deflate = symbols.get(b"inflate", []), symbols.get(b"deflate", [])
    if len(inflate) != 1 or len(deflate) != 1:
        raise HardenError("it does not take inflate and deflate from a shared zlib")
    changed = bytearray(data)
    changed[inflate[0] : inflate[0] + 4] = data[deflate[0] : deflate[0] + 4]  # offset of its name
    for said, instead in _REFUSALS.items():
        changed = changed.replace(said, instead)
    return bytes(changed)


def refuses_compression(data: bytes) -> bool:
    """Return whether `refuse_compression` has changed this binary."""
    symbols = _dynamic_symbols(data)
    return b"inflate" not in symbols and len(symbols.get(b"deflate", ())) == 2


def bound_nesting(data: bytes) -> bytes:
    """Make it refuse JSON that is nested so deeply that the parser would overflow its stack.

    A bracket takes 80 bytes of a thread's stack: 14 MB of brackets crash a 24.10 whose threads have
    1 GiB, and a thread keeps the stack it has once used. With `MAX_STACK` some 800,000 brackets
    are an error. Raises HardenError for any other binary. Triton's source parses without recursion
    since April 2026.
    """
    if _BUILD not in data:
        raise HardenError("its build is not known")
    entry = _PARSE_VALUE + len(_PUSHES)
    code = b"".join(
        (
            bytes.fromhex("64488b042510000000"),  # mov rax, fs:0x10: the end of the thread's stack
            bytes.fromhex("4829e0"),  # sub rax, rsp; negative in the main thread
            b"\x48\x3d" + struct.pack("<i", MAX_STACK),  # cmp rax, MAX_STACK
            bytes.fromhex("7f0b"),  # jg over the next two lines
            _PUSHES,
        )
    )
    code += _jump(_UNUSED + len(code), entry)
    code += bytes.fromhex("c7473010000000")  # mov dword [rdi + 0x30], 16: kParseErrorTermination
    code += b"\xc3"  # ret
    there = _jump(_PARSE_VALUE, _UNUSED) + b"\x90"
    changed = bytearray(data)
    for place, before, after in (
        (_PARSE_VALUE, _PUSHES, there),
        (_UNUSED, bytes(len(code)), code),
    ):
        end = place + len(after)
        if changed[place:end] not in (before, after):
            raise HardenError("its code is not known")
        changed[place:end] = after
    return bytes(changed.replace(_TERMINATED, _TOO_DEEP))


def _jump(place: int, target: int) -> bytes:
    return b"\xe9" + struct.pack("<i", target - place - 5)


def _dynamic_symbols(data: bytes) -> dict[bytes, list[int]]:
    """Return the symbols of an ELF file that are bound at its start: name -> offsets."""
    found: dict[bytes, list[int]] = {}
    for begin, size, names in _symbol_tables(data):
        for place in range(begin, begin + size, _SYMBOL_BYTES):
            name = names + struct.unpack_from("<I", data, place)[0]
            found.setdefault(data[name : data.index(0, name)], []).append(place)
    return found


def _symbol_tables(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield each table's offset and size, and the offset of its names."""
    (begin,) = struct.unpack_from("<Q", data, _SECTIONS_AT)
    (number,) = struct.unpack_from("<H", data, _NUM_SECTIONS_AT)
    starts = (begin + index * _SECTION_BYTES for index in range(number))
    sections = [struct.unpack_from("<IIQQQQI", data, start) for start in starts]
    for _, kind, _, _, offset, size, link in sections:
        if kind == _DYNAMIC_SYMBOLS:
            yield offset, size, sections[link][4]


def harden(binary: Path) -> list[str]:
    """Change a tritonserver's binary; return a line for each change that failed. Idempotent.

    Running processes keep the old one. Raises OSError if it cannot be read or replaced.
    """
    before = data = binary.read_bytes()
    failures = []
    for change, consequence in (
        (refuse_compression, "compressed requests are inflated, whatever they grow to"),
        (bound_nesting, "JSON may be nested as deeply as its parser has stack for"),
    ):
        try:
            data = change(data)
        except (HardenError, struct.error, ValueError) as error:
            failures.append(f"{binary}: {consequence}: {error}")
    if data != before:
        changed = binary.with_name(f"{binary.name}.changed")
        changed.write_bytes(data)
        shutil.copymode(binary, changed)
        changed.replace(binary)
    return failures


def main() -> int:
    """Harden the binary that the command line names; return 1 if a change failed."""
    failures = harden(Path(sys.argv[1]))
    for line in failures:
        print(f"slipstream: {line}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
