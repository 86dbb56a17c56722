"""`slipstream quantize`: scales move without a change, files are whole, wrong inputs are named."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fixtures.models import static_scales
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    edit_config,
    make_model,
    make_runner,
    rewrite,
)
from fixtures.models.gguf_files import write_gguf
from fixtures.quantize import tiny
from fixtures.tiers import quick_of
from safetensors.torch import load_file
from slipstream.layers.residual import Residual
from slipstream_client.cli import main
from slipstream_convert.writer import Writer
from slipstream_quantize import make
from slipstream_quantize.job import Job, Report, divide_rows, write
from slipstream_quantize.make import recipe_of
from slipstream_quantize.observe import Seen
from slipstream_quantize.opened import Opened, Running
from slipstream_quantize.recipe import RECIPES
from slipstream_quantize.smooth import divide_norm
from slipstream_quantize.text import CALIBRATION, MEASURED, default_texts, read_texts

TEXT = "".join(f"{i} bottles of ink stand on the wall, {i * i} of them full.\n" for i in range(99))
FAMILIES = {
    "mha": ("llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "gqa, tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"num_key_value_heads": 4}),
    "qwen3": ("qwen3", {"num_key_value_heads": 4}),
    "gemma3": ("gemma3", {"num_key_value_heads": 4, "sliding_window": 16}),
    "gpt2, no gate": ("gpt2", {"num_key_value_heads": 4, "n_inner": 96}),
    "apertus, no gate": ("apertus", {"num_key_value_heads": 4}),
}
QUICK = ("mha", "gemma3", "gpt2, no gate", "apertus, no gate")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def quantize(directory: Path, output: Path, scheme: str, *options: str) -> int:
    where = ["--checkpoint", str(directory), "--output", str(output), "--scheme", scheme]
    return main(["quantize", *where, "--device", "cpu", *options])


def logits(opened: Opened) -> torch.Tensor:
    ids = torch.arange(3 * 40).view(3, 40) * 7 % 256
    with torch.inference_mode():
        sums = [each for _, each in Running(opened, ids).sums()]
        return torch.stack([opened.decoder.logits(Residual(each)).float() for each in sums])


@pytest.mark.parametrize("family", quick_of(FAMILIES, QUICK))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scales_that_move_change_nothing(family: str, dtype: str, tmp_path: Path) -> None:
    """Norms are rounded to the dtype of the files, and what is multiplied is what they became."""
    name, overrides = FAMILIES[family]
    heads, has_gate = overrides.get("num_key_value_heads", 2), name not in ("gpt2", "apertus")
    opened = Opened(tiny.checkpoint(tmp_path, name, **overrides), "cpu", dtype)
    before = logits(opened)
    generator, moved = torch.Generator().manual_seed(0), 0
    with torch.inference_mode():
        for place in (place for block in opened.blocks for place in block):
            values = place.probe.values
            scales = torch.rand(values.shape[1], generator=generator) * 4 + 0.2
            if place.norm is not None:
                scales = divide_norm(place.norm, scales, opened.dtype)
            elif place.rows is not None:
                divide_rows(place, scales)
            else:
                continue
            values.copy_(values * scales)
            moved += 1
    assert moved == 2 * ((4 if heads == 4 else 3) - (not has_gate))  # none through an activation
    # A layer norm's bias is rounded for itself.
    most = 1e-4 if has_gate or dtype == "float32" else 2e-3
    assert (logits(opened) - before).abs().max() <= most * before.abs().max()


@pytest.mark.parametrize("scheme", RECIPES)
def test_each_scheme_writes_a_checkpoint(
    scheme: str, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tiny.checkpoint(tmp_path / "original", "llama")
    options = ["--measure", str(text)]
    if RECIPES[scheme].needs_text:
        options += ["--calibration", str(text), "--samples", "4", "--sample-length", "64"]
    assert quantize(directory, tmp_path / "out", scheme, *options) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    report = json.loads((tmp_path / "out" / "quantize_report.json").read_text())
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    original = load_file(directory / "model.safetensors")
    recipe = RECIPES[scheme]
    method = "fp8" if scheme == "fp8-block" else "compressed-tensors"
    assert config["quantization_config"]["quant_method"] == method
    assert len(report["errors"]) == 14
    assert 0 < max(report["errors"].values()) < 0.2
    assert 0.9 < report["bits_per_byte_after"] / report["bits_per_byte_before"] < 1.1
    assert report["bytes_after"] == sum(x.numel() * x.itemsize for x in tensors.values())
    assert {name for name in original if "proj" not in name} <= tensors.keys()
    assert bool(report["smoothed"]) == bool(recipe.smooth)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert "bits a byte" in capsys.readouterr().out


def test_better_recipes_have_less_error(tmp_path: Path, text: Path) -> None:
    directory = tiny.checkpoint(tmp_path / "original", "llama")

    def made(scheme: str) -> Opened:
        output = tmp_path / scheme
        assert quantize(directory, output, scheme, "--no-measure", *options[scheme]) == 0
        return json.loads((output / "quantize_report.json").read_text())["errors"]

    how = ["--calibration", str(text), "--samples", "16", "--sample-length", "64"]
    options = {"int8-sq": how, "gptq": how, "awq": how, "awq-gptq": how}
    means = {name: sum(made(name).values()) for name in options}
    assert means["int8-sq"] < means["awq-gptq"] <= means["awq"]
    assert means["gptq"] <= means["awq"]


def test_fp8_corrects_its_errors(tmp_path: Path) -> None:
    """With rows as they are, logits of the text that it was made with are nearer."""
    directory = tiny.checkpoint(tmp_path)
    text = torch.arange(20 * 64).view(20, 64) * 7 % 256
    wanted, off = logits(Opened(directory, "cpu")), {}
    for scheme in ("fp8", "fp8-gptq"):
        opened = Opened(directory, "cpu")
        Job(opened, RECIPES[scheme], text).run()
        for probe in opened.probes:
            probe.rounding = None
        off[scheme] = float((logits(opened) - wanted).norm())
    assert 0 < off["fp8-gptq"] < 0.95 * off["fp8"]


def test_scales_of_a_cache_are_kept_and_true(tmp_path: Path, text: Path) -> None:
    directory = tiny.checkpoint(tmp_path / "original", "llama", num_key_value_heads=4)
    static_scales.add(directory, static_scales.scales())
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    how = {"quant_method": "compressed-tensors", "kv_cache_scheme": cache}
    edit_config(directory, quantization_config=how)
    options = ["--calibration", str(text), "--samples", "4", "--sample-length", "64"]
    assert quantize(directory, tmp_path / "out", "awq", "--no-measure", *options) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    report = json.loads((tmp_path / "out" / "quantize_report.json").read_text())
    assert config["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name, scale in static_scales.scales().items():
        assert float(tensors[name]) == pytest.approx(float(scale))
    # A scale of values holds for those that were calibrated, so none moves out of them.
    assert not any("o_proj" in name for name in report["smoothed"])
    assert any("down_proj" in name for name in report["smoothed"])


def test_a_gguf_file(tmp_path: Path) -> None:
    model = make_model("llama", **tiny.SIZES)
    path = tmp_path / "model.gguf"
    write_gguf(model, "llama", path, "Q8_0")
    assert quantize(path, tmp_path / "out", "int8", "--no-measure") == 0
    with_gguf, again = tmp_path / "out" / "gguf.json", tmp_path / "out" / "config.json"
    assert not with_gguf.exists()
    assert json.loads(again.read_text())["architectures"] == ["LlamaForCausalLM"]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj"
    scale, words = tensors[f"{name}.weight_scale"], tensors[f"{name}.weight_packed"]
    got = (words.view(torch.uint8).view(64, 64).float() - 128) * scale.float()
    expected = dict(model.named_parameters())[f"{name}.weight"]
    assert (got - expected).abs().max() <= 0.02 * expected.abs().max()


def test_shards_and_what_is_beside_weights(tmp_path: Path) -> None:
    directory = tiny.checkpoint(tmp_path / "original", "llama")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "weights.bin").write_bytes(b"old")
    writer = Writer(tmp_path / "out", shard_bytes=3000)
    tensors = {f"t{i}": torch.full((i + 1, 100), float(i)) for i in range(6)}
    writer.add(tensors)
    writer.finish(directory, {"config.json": {"a": 1}})
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert "chat_template.jinja" in files
    assert "weights.bin" not in files
    assert set(index["weight_map"]) == set(tensors)
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], tensors[name])
    assert index["metadata"]["total_size"] == sum(x.numel() * 4 for x in tensors.values())


def test_default_texts_do_not_overlap() -> None:
    assert not set(CALIBRATION) & set(MEASURED)
    ours, measured = (
        {line.strip() for text in default_texts(x) for line in text.splitlines()}
        for x in (False, True)
    )
    long = {line for line in measured if len(line) >= 40}
    assert len(long & ours) < 0.002 * len(long)  # sources share a few


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--group-size", "48"], "--group-size 48 does not divide the 64 inputs of a matrix"),
        (["--samples", "3"], "--scheme int4 needs no text"),
        (["--calibration", "x.txt"], "--scheme int4 needs no text"),
        (["--no-measure", "--measure", "x"], "exclude each other"),
        (["--scheme", "fp8", "--symmetric"], "--symmetric: --scheme fp8 has no groups"),
        (
            ["--scheme", "int8", "--group-size", "32"],
            "--group-size 32: --scheme int8 has no groups",
        ),
        (["--scheme", "gptq", "--calibration", "none.txt"], "none.txt: cannot be read: No such"),
        (["--scheme", "gptq", "--sample-length", "129"], "129 tokens are longer than the"),
        (["--scheme", "gptq", "--sample-length", "9"], "--sample-length 9: a piece has at least"),
    ],
)
def test_wrong_options(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tiny.checkpoint(tmp_path / "original", "llama")
    assert quantize(directory, tmp_path / "out", "int4", *options) == 1
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["original"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"too short", "9 tokens, a piece needs 64"),
        ("a.txt", b"", "0 tokens, a piece needs 64"),
        ("a.txt", b"\xff\xfe", "is not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"words": 1}', "line 2 is no object with a string `text`"),
        ("a.jsonl", b"[1", "line 1 is no object"),
        ("a.jsonl", b"[" * 99_999, "line 1 is no object"),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1: `text` has half of a pair of surrogates"),
    ],
)
def test_wrong_texts(
    name: str, content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tiny.checkpoint(tmp_path / "original", "llama")
    path = tmp_path / name
    path.write_bytes(content)
    options = ["--calibration", str(path), "--sample-length", "64"]
    assert quantize(directory, tmp_path / "out", "gptq", *options) == 1
    assert message in capsys.readouterr().err


def test_texts_that_are_read(tmp_path: Path) -> None:
    """Marks of order, empty lines, and what ends a line of text, but none of JSON."""
    text = "of one\u2028and\x85another line"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8-sig")
    assert read_texts(tmp_path / "a.txt") == [text]
    line = json.dumps({"text": text}, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_bytes(f"\ufeff{line}\r\n\n{line}\n".encode())
    assert read_texts(tmp_path / "a.jsonl") == [text, text]


def test_short_of_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(job: Job) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Job, "run", failed)
    directory = tiny.checkpoint(tmp_path / "original", "llama")
    assert quantize(directory, tmp_path / "out", "int8", "--no-measure") == 1
    assert "--device cpu: the GPU has too little memory" in capsys.readouterr().err
    monkeypatch.setattr(make, "least_bytes", lambda *_: 10**15)
    assert quantize(directory, tmp_path / "out", "int8", "--no-measure") == 1
    assert "1,000,000.00 GB will be written, at least" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["original"]


_HEADS = {"num_key_value_heads": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
LAYOUTS: dict[str, tuple[str, str, dict[str, object]]] = {  # family, scheme, what is its own
    "gpt_neox": ("gpt_neox", "awq", {}),
    "falcon": ("falcon", "int4", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "bloom": ("bloom", "awq-gptq", {"hidden_size": 64, "n_head": 4}),
    "bloom, sums of norms": (
        "bloom",
        "awq",
        {"hidden_size": 64, "n_head": 4, "apply_residual_connection_post_layernorm": True},
    ),
    "gpt2": ("gpt2", "awq", {"n_inner": 96}),
    "gpt_bigcode": ("gpt_bigcode", "int8", {"multi_query": False, "n_inner": 96}),
    "phi3": ("phi3", "awq", _HEADS),
    "apertus": ("apertus", "awq", _HEADS),
    "glm4": ("glm4", "nvfp4", {}),
    "cohere": ("cohere", "int4", {"use_qk_norm": True}),
    "codegen": ("codegen", "fp8", {"n_inner": 96, "rotary_dim": 8}),
    "olmo, values that are cut": ("olmo", "awq", {"clip_qkv": 0.5} | _HEADS),
    "stablelm": ("stablelm", "int8-sq", _HEADS),
    "mixtral": ("mixtral", "awq", _LOCAL),
    "qwen2 moe": ("qwen2_moe", "awq", {"shared_expert_intermediate_size": 96} | _EXPERTS),
    "qwen3 moe": ("qwen3_moe", "fp8-block", {"num_hidden_layers": 2} | _EXPERTS),
    "qwen3 moe, int4": ("qwen3_moe", "int4", {"mlp_only_layers": [1]} | _EXPERTS),
    "phimoe": ("phimoe", "int8", _LOCAL),
    "latents": (
        "youtu",
        "awq",
        {"num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 32, "v_head_dim": 16}
        | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16},
    ),
    "latents of keys alone": (
        "deepseek_v3",
        "int8-sq",
        {"num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 32, "v_head_dim": 16}
        | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "first_k_dense_replace": 9},
    ),
}


@pytest.mark.parametrize("name", quick_of(LAYOUTS, {"gpt_neox", "mixtral", "latents"}))
def test_other_layouts_and_mixtures(name: str, tmp_path: Path) -> None:
    """What is read of the new checkpoint computes what the quantised decoder in memory does."""
    family, scheme, own = LAYOUTS[name]
    directory = tiny.checkpoint(tmp_path / "original", family, **own)
    opened = Opened(directory, "cpu", "float32")
    before = logits(opened)
    recipe = recipe_of(opened, scheme, None, symmetric=False)
    assert recipe.symmetric or not opened.has_experts  # transformers reads no zeros of experts
    recipe = replace(recipe, activations="" if scheme != "int8-sq" else recipe.activations)
    text = torch.arange(2 * 64).view(2, 64) * 13 % 256
    writer, output = Writer(tmp_path / "out"), tmp_path / "out"
    job = Job(opened, recipe, text if recipe.needs_text else None, writer)
    job.run()
    write(opened, directory, recipe, Report("", {}), writer)
    for probe in opened.probes:
        probe.rounding = None
    generation = Generation((torch.arange(40) * 7 % 256).tolist(), 1)
    Driver(make_runner(output, quantization="none"), keep_logits=True).finish([generation])
    wanted = logits(opened)[0, -1]
    assert (generation.logits[0] - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    assert (wanted - before[0, -1]).abs().max() <= 0.5 * before[0, -1].abs().max()
    assert bool(job.smoothed) == bool(recipe.smooth)
    if "apply_residual_connection_post_layernorm" in own:  # the norm is the sum, too
        assert all("o_proj" in each for each in job.smoothed)
    if "clip_qkv" in own:
        assert not any("o_proj" in each for each in job.smoothed)


def test_rows_of_experts_are_seen(tmp_path: Path) -> None:
    """Each row is seen by the experts that it goes to; outputs are what they are unwatched."""
    directory = tiny.checkpoint(tmp_path, "mixtral", **_LOCAL)
    wanted, opened = (
        logits(Opened(directory, "cpu", "float32")),
        Opened(directory, "cpu", "float32"),
    )
    probes = [probe for probe in opened.probes if ".experts." in probe.names[0]]
    for probe in probes:
        probe.seen = Seen()
    assert torch.equal(logits(opened), wanted)
    seen = [probe.seen.count for probe in probes if probe.seen is not None]
    layers = len(opened.decoder.blocks)
    assert sum(seen) == layers * 2 * _LOCAL["num_experts_per_tok"] * wanted[..., 0].numel()


def test_layouts_that_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tiny.checkpoint(tmp_path / "phi3", "phi3")
    assert quantize(directory, tmp_path / "out", "fp8-block", "--no-measure") == 1
    assert "qkv_proj are not in the decoder's order" in capsys.readouterr().err
    directory = tiny.checkpoint(tmp_path / "gpt_oss", "gpt_oss", **_LOCAL)
    assert quantize(directory, tmp_path / "out", "int8", "--no-measure") == 1
    assert "experts that are one tensor are not quantised" in capsys.readouterr().err
    path = write_gguf(make_model("phi3", **tiny.SIZES), "phi3", tmp_path / "model.gguf")
    assert quantize(path, tmp_path / "out", "int8", "--no-measure") == 1
    assert "has another layout in a Hugging Face directory" in capsys.readouterr().err


def fewer_tokens(tensors: dict[str, torch.Tensor]) -> None:
    """Cut embedding and head."""
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:200].clone()


def test_wrong_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tiny.checkpoint(tmp_path / "original", "llama")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    assert quantize(directory, tmp_path / "full", "int8") == 1
    assert "is there already, and not an empty directory" in capsys.readouterr().err
    whole = (directory / "tokenizer.json").read_bytes()
    (directory / "tokenizer.json").write_bytes(whole[:-9])
    assert quantize(directory, tmp_path / "out", "gptq") == 1
    assert f"{directory}/tokenizer.json: cannot be read: " in capsys.readouterr().err
    (directory / "tokenizer.json").write_bytes(whole)
    edit_config(directory, vocab_size=200)
    rewrite(directory, fewer_tokens)
    assert quantize(directory, tmp_path / "out", "int8") == 1
    assert "makes token 2" in (said := capsys.readouterr().err)
    assert "but the model has 200: it is another model's" in said
    (directory / "tokenizer.json").unlink()
    assert quantize(directory, tmp_path / "out", "gptq") == 1
    assert "no tokenizer.json" in capsys.readouterr().err
    key = "model.layers.0.mlp.up_proj.weight"
    rewrite(directory, lambda tensors: tensors[key].fill_(float("nan")))
    assert quantize(directory, tmp_path / "out", "int8", "--no-measure") == 1
    assert f"tensor {key} holds NaN" in capsys.readouterr().err
    edit_config(directory, quantization_config={"quant_method": "awq", "bits": 4})
    assert quantize(directory, tmp_path / "out", "int8", "--no-measure") == 1
    assert "quantization_config says awq" in capsys.readouterr().err
    assert quantize(tmp_path / "none", tmp_path / "out", "int8") == 1
    assert "no such directory" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["embed_tokens", "layers.0.mlp.down_proj"])
def test_numbers_beyond_a_dtype_are_refused(
    part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An embedding's, and a scale's: bfloat16 holds what would be infinite in float16."""
    directory, key = tiny.checkpoint(tmp_path / "original"), f"model.{part}.weight"
    rewrite(directory, lambda tensors: tensors[key].mul_(1e9))
    options = ["--no-measure", "--dtype", "float16"]
    assert quantize(directory, tmp_path / "out", "int8", *options) == 1
    assert f"tensor {key} has values beyond torch.float16; --dtype bfl" in capsys.readouterr().err
    assert quantize(directory, tmp_path / "out", "int8", "--no-measure") == 0
