"""The model of `make chat` in other types of GGUF, of the same values: for `cpu.py`."""

from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

TYPES = {"int4": "Q4_1", "int8": "Q8_0", "fp32": "F32"}


def model_of(source: Path, bits: str) -> Path:
    """Return the file in a type, made beside `source`, which is in Q4_1, if it is not there."""
    kind = TYPES[bits]
    if kind in source.name:
        return source
    path = source.with_name(source.name.replace(TYPES["int4"], kind))
    if not path.is_file():
        draft = path.with_suffix(".draft")
        _write(source, draft, GGMLQuantizationType[kind])
        draft.rename(path)
    return path


def _write(source: Path, path: Path, kind: GGMLQuantizationType) -> None:
    reader = GGUFReader(source)
    writer = GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        of = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], of)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        own = kind if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quantize(values, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def weight_bytes(path: Path) -> int:
    """Return the bytes of all tensors of a file: what a step reads, as the head is tied."""
    return sum(int(tensor.n_bytes) for tensor in GGUFReader(path).tensors)
