"""From a checkpoint to a repository: the same bytes again, faults told, nobody's files touched."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fixtures.composing import run, settings, tree
from fixtures.models.checkpoints import edit_config, make_model
from fixtures.models.checkpoints import save as save_model
from slipstream.config import EngineConfig
from slipstream.errors import CheckpointError, ConfigError
from slipstream_client.cli import main
from slipstream_compose import cli, convert
from slipstream_compose.compose import ComposeError
from slipstream_contract.errors import ContractError
from slipstream_contract.tensors import MODELS
from slipstream_contract.vocab import UnsupportedTokenizerError
from tokenizers import Tokenizer


def test_a_repository_has_every_model_and_is_the_same_again(checkpoint, tmp_path, capsys):
    assert run(checkpoint, tmp_path) == 0
    first = tree(tmp_path)
    assert {path.partition("/")[0] for path in first} == set(MODELS)
    assert set(first) == {
        f"{name}/{file}" for name in MODELS for file in ("config.pbtxt", "1/model.json")
    }
    capsys.readouterr()
    times = {path: (tmp_path / path).stat().st_mtime_ns for path in first}
    assert run(checkpoint, tmp_path) == 0
    assert tree(tmp_path) == first
    assert "wrote" not in capsys.readouterr().out
    assert {path: (tmp_path / path).stat().st_mtime_ns for path in first} == times
    assert run(checkpoint, tmp_path, "--check") == 0


@pytest.mark.rest
def test_another_process_with_another_hash_seed_writes_the_same_bytes(checkpoint, tmp_path):
    run(checkpoint, tmp_path / "here")
    command = [sys.executable, "-m", "slipstream_client.cli", "compose"]
    command += ["--checkpoint", str(checkpoint), "--output", str(tmp_path / "there")]
    environment = os.environ | {"PYTHONHASHSEED": "12345", "LC_ALL": "C"}
    subprocess.run(command, check=True, env=environment, capture_output=True, cwd="/")
    assert tree(tmp_path / "there") == tree(tmp_path / "here")


def test_options_reach_the_engine_and_only_those(checkpoint, tmp_path):
    run(checkpoint, tmp_path)
    bare = {"checkpoint": str(checkpoint), "model": "a-model"}
    assert settings(tmp_path) == {"wiring": "composed", "engine": bare}
    options = "--dtype bfloat16 --kv-cache-tokens 512 --max-num-seqs 8 --max-num-batched-tokens 64"
    more = (
        "--max-model-len 128 --block-size 16 --model-name shown --quantization fp8 --deterministic "
        "--max-waiting 7 --max-waiting-tokens 99 --gpu-hour-price 2.5 --request-log /var/log/r "
        "--stuck-after-s 300 --kv-cache-dtype int8 --kv-cache-host-gb 1.5"
    )
    run(checkpoint, tmp_path, *options.split(), *more.split())
    engine = settings(tmp_path)["engine"]
    assert EngineConfig(**engine) == EngineConfig(
        checkpoint=str(checkpoint),
        model="shown",
        dtype="bfloat16",
        quantization="fp8",
        kv_cache_dtype="int8",
        deterministic=True,
        kv_cache_tokens=512,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=128,
        block_size=16,
        max_waiting=7,
        max_waiting_tokens=99,
        stuck_after_s=300,
        gpu_hour_price=2.5,
        kv_cache_host_bytes=1_500_000_000,
        request_log="/var/log/r",
    )


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--gpu-hour-price", "-1", "gpu_hour_price = -1.0 is not a price"),
        ("--gpu-hour-price", "nan", "gpu_hour_price = nan is not a price"),
        ("--attention-window", "999", "attention_window = 999 is above max_model_len = 256"),
        ("--sink-tokens", "4", "sink_tokens = 4 needs an attention_window"),
        ("--kv-cache-host-gb", "-2", "kv_cache_host_bytes = -2000000000 is below 0"),
        (
            "--kv-cache-host-gb",
            "0.000001",
            "kv_cache_host_bytes = 1000 is below a block's 32768 bytes",
        ),
        ("--request-log", "here.json", "request_log = 'here.json' is not an absolute path"),
        ("--stuck-after-s", "2", "stuck_after_s = 2 is below 3"),
    ],
)
def test_what_the_engine_would_refuse_is_refused(checkpoint, tmp_path, option, value, words):
    with pytest.raises(ConfigError) as caught:
        run(checkpoint, tmp_path, option, value)
    assert str(caught.value) == words
    assert not tree(tmp_path)


@pytest.mark.parametrize("value", ["nan", "inf", "much"])
def test_gigabytes_that_are_no_number(checkpoint, tmp_path, capsys, value):
    with pytest.raises(SystemExit):
        run(checkpoint, tmp_path, "--kv-cache-host-gb", value)
    assert f"'{value}' is not a number of GB" in capsys.readouterr().err


def test_wirings(checkpoint, tmp_path, capsys):
    run(checkpoint, tmp_path)
    for model, wiring in [
        ("tensorrt_llm_bls", "fused"),
        ("vllm_model", "vllm"),
        ("slipstream_health", "health"),
    ]:
        assert settings(tmp_path, model) == {"wiring": wiring, "engine_of": "tensorrt_llm"}
    assert run(checkpoint, tmp_path, "--wiring", "fused", "--check") == 1
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert lines[0].startswith("ensemble/config.pbtxt: line 4 is 'platform: \"ensemble\"', not")
    assert lines[1].startswith("ensemble/1/model.json: ")
    assert run(checkpoint, tmp_path, "--wiring", "fused") == 0
    assert settings(tmp_path, "ensemble") == {"wiring": "fused", "engine_of": "tensorrt_llm"}


def test_a_checkpoint_inside_is_referred_to_relatively(checkpoint, tmp_path, monkeypatch):
    inside = tmp_path / "models" / "tensorrt_llm" / "1" / "weights"
    inside.parent.mkdir(parents=True)
    inside.symlink_to(checkpoint)
    run(inside, tmp_path / "models")
    before = tree(tmp_path / "models")
    assert settings(tmp_path / "models")["engine"]["checkpoint"] == "weights"
    for stage in ("preprocessing", "postprocessing"):
        version = tmp_path / "models" / stage / "1"
        assert (version / "../../tensorrt_llm/1/weights").samefile(checkpoint)
        config = (tmp_path / "models" / stage / "config.pbtxt").read_text()
        assert '"../../tensorrt_llm/1/weights"' in config
    monkeypatch.chdir(tmp_path / "models")
    assert run(Path("tensorrt_llm/1/weights"), Path(), "--check") == 0
    assert tree(tmp_path / "models") == before
    moved = (tmp_path / "models").rename(tmp_path / "moved")
    assert run(moved / "tensorrt_llm/1/weights", moved, "--check") == 0


def test_a_checkpoint_where_triton_expects_a_model_is_refused(checkpoint, tmp_path):
    (tmp_path / "weights").symlink_to(checkpoint)
    with pytest.raises(ComposeError, match="is where Triton takes it for a model"):
        run(tmp_path / "weights", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


def test_check_names_every_difference(checkpoint, tmp_path, capsys):
    run(checkpoint, tmp_path)
    (tmp_path / "vllm_model" / "config.pbtxt").unlink()
    path = tmp_path / "tensorrt_llm" / "config.pbtxt"
    path.write_text(path.read_text().replace("max_batch_size: 64", "max_batch_size: 8"))
    before = tree(tmp_path)
    capsys.readouterr()
    assert run(checkpoint, tmp_path, "--check", "--block-size", "16") == 1
    assert capsys.readouterr().out.splitlines() == [
        "tensorrt_llm/config.pbtxt: line 5 is 'max_batch_size: 8', not 'max_batch_size: 64'",
        'tensorrt_llm/1/model.json: line 5 is \'"model": "a-model"\', not \'"model": "a-model",\'',
        "vllm_model/config.pbtxt: missing",
    ]
    assert tree(tmp_path) == before


def test_a_full_disk_names_the_file_and_leaves_no_half(checkpoint, tmp_path, monkeypatch):
    def refuse(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    said = f"--output: {tmp_path}/ensemble/config.pbtxt cannot be written: No space left"
    with pytest.raises(ComposeError, match=said):
        run(checkpoint, tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("file", ["config.pbtxt", "1/model.json"])
def test_files_of_others_are_not_overwritten(checkpoint, tmp_path, file):
    mine = tmp_path / "vllm_model" / file
    mine.parent.mkdir(parents=True)
    mine.write_text('backend: "vllm"\n')
    before = tree(tmp_path)
    with pytest.raises(ComposeError, match=f"vllm_model/{file} was not written by"):
        run(checkpoint, tmp_path)
    assert tree(tmp_path) == before


def test_without_a_tokenizer_there_are_no_text_models(checkpoint, bare, tmp_path, capsys):
    run(checkpoint, tmp_path)
    other = tmp_path / "resnet" / "config.pbtxt"
    other.parent.mkdir()
    other.write_text("# somebody's\n")
    capsys.readouterr()
    assert run(bare, tmp_path, "--check") == 1
    assert "ensemble/config.pbtxt: not part of this repository" in capsys.readouterr().out
    assert run(bare, tmp_path) == 0
    out = capsys.readouterr().out
    assert "no ensemble: the checkpoint has no tokenizer" in out
    assert "removed ensemble/config.pbtxt" in out
    assert "ice_text.model" not in out
    folders = {path.name for path in tmp_path.iterdir()}
    assert folders == {"tensorrt_llm", "slipstream_health", "resnet"}


def test_a_vocabulary_that_is_not_converted_is_named(bare, tmp_path, capsys):
    folder = shutil.copytree(bare, tmp_path / "glm")
    (folder / "ice_text.model").write_bytes(b"pieces")
    assert run(folder, tmp_path / "made") == 0
    out = capsys.readouterr().out
    assert "ice_text.model is not made a tokenizer.json: num_image_tokens of" in out
    assert "requests bring token ids" in out


def test_tokens_beyond_the_vocabulary_are_named(checkpoint, tmp_path, capsys):
    folder = shutil.copytree(checkpoint, tmp_path / "small")
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    for vocab_size in (size - 3, size):
        model = make_model(hidden_size=64, num_hidden_layers=1, vocab_size=vocab_size)
        (folder / "model.safetensors").unlink()  # which is a link
        save_model(model, folder)
        assert run(folder, tmp_path / f"{vocab_size}") == 0
        said = f"the tokenizer has 3 tokens that vocab_size = {vocab_size} leaves out, from '"
        assert (said in capsys.readouterr().out) == (vocab_size < size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--kv-cache-tokens 0", "kv_cache_tokens = 0 is below 32"),
        ("--kv-cache-tokens 8", "kv_cache_tokens = 8 is below 32"),
        ("--max-num-seqs -1", "max_num_seqs = -1"),
        ("--max-num-batched-tokens 0", "max_num_batched_tokens = 0"),
        ("--max-model-len 9999", "max_model_len = 9999 is above the checkpoint's context of 256"),
        ("--block-size 24", "block_size = 24 is not a power of two between 8 and 256"),
        ("--kv-cache-dtype int8 --block-size 8", "'int8' needs block_size >= 16, not 8"),
    ],
)
def test_impossible_options_are_refused_at_once(checkpoint, tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        run(checkpoint, tmp_path, *options.split())
    assert not list(tmp_path.iterdir())


def test_a_model_that_has_two_numbers_of_instances(checkpoint, tmp_path):
    twice = ("--instances", "postprocessing=2", "--instances", "postprocessing=3")
    with pytest.raises(ComposeError, match="--instances names a model twice"):
        run(checkpoint, tmp_path, *twice)


def test_a_chat_template_that_no_stage_could_read_is_refused(checkpoint, tmp_path):
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    (copy / "chat_template.jinja").write_text("{{")
    with pytest.raises(ContractError, match="copy: chat template 'default': "):
        run(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_defaults_that_no_request_could_have_are_refused(checkpoint, tmp_path):
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    (copy / "generation_config.json").write_text('{"top_p": 0}')
    with pytest.raises(ContractError, match=r"copy/generation_config.json: top_p is 0, not a "):
        run(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_commands_that_are_printed_can_be_pasted(checkpoint, tmp_path, capsys):
    copy = shutil.copytree(checkpoint, tmp_path / "ein Modell's")
    assert run(copy, tmp_path / "ein Ort") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert shlex.split(last)[2:] == [
        "slipstream",
        "serve",
        "--model-repository",
        f"{tmp_path}/ein Ort",
    ]
    choose = ["profile", "select", "--checkpoint", str(copy), "--gpus", "H200"]
    assert main(choose) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert shlex.split(last)[:4] == ["slipstream", "compose", "--checkpoint", str(copy)]


def test_a_cache_of_downloads_names_its_snapshot(checkpoint, tmp_path):
    snapshot = shutil.copytree(checkpoint, tmp_path / "models--a--b" / "snapshots" / "0123")
    with pytest.raises(CheckpointError, match=f"has one, such as {snapshot}"):
        run(tmp_path / "models--a--b", tmp_path / "out")


def test_gpus_need_a_profile(checkpoint, tmp_path):
    with pytest.raises(ComposeError, match=r"--gpus .* needs --profile"):
        run(checkpoint, tmp_path, "--gpus", "H100")
    assert not list(tmp_path.iterdir())


def test_unsupported_checkpoints_are_refused(checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match="no such directory"):
        run(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        run(tmp_path / "empty", tmp_path / "out")
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    edit_config(odd, architectures=["MambaForCausalLM"])
    with pytest.raises(CheckpointError, match="MambaForCausalLM"):
        run(odd, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def sentencepiece_only(bare, tmp_path) -> Path:
    folder = tmp_path / "old"
    folder.mkdir()
    for path in bare.iterdir():
        os.link(path, folder / path.name)
    (folder / "tokenizer.model").write_bytes(b"no protocol buffer")
    return folder


def test_a_sentencepiece_model_alone_says_what_to_install(
    sentencepiece_only, tmp_path, monkeypatch
):
    monkeypatch.setattr(convert, "find_spec", lambda name: None)
    with pytest.raises(ComposeError, match=r"pip install 'sentencepiece<.*transformers>=5"):
        run(sentencepiece_only, tmp_path / "out")
    with pytest.raises(ComposeError, match=r"has no tokenizer\.json yet"):
        run(sentencepiece_only, tmp_path / "out", "--check")
    assert not (tmp_path / "out").exists()


def test_a_broken_sentencepiece_model_is_named(sentencepiece_only, tmp_path):
    pytest.importorskip("sentencepiece")
    with pytest.raises(ComposeError, match=r"tokenizer\.model cannot be made a tokenizer\.json"):
        run(sentencepiece_only, tmp_path / "out")


def test_a_sentencepiece_model_is_converted(sentencepiece_only, tmp_path, capsys):
    sentencepiece = pytest.importorskip("sentencepiece")
    text = tmp_path / "text"
    text.write_text(Path(__file__).read_text())
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(sentencepiece_only / "tokenizer"),
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        hard_vocab_limit=False,
    )
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = json.dumps({"tokenizer_class": "LlamaTokenizer"} | roles)
    (sentencepiece_only / "tokenizer_config.json").write_text(config)
    assert run(sentencepiece_only, tmp_path / "out") == 0
    assert "wrote" in capsys.readouterr().out
    assert (sentencepiece_only / "tokenizer.json").is_file()
    assert (tmp_path / "out" / "ensemble" / "config.pbtxt").is_file()
    assert run(sentencepiece_only, tmp_path / "out", "--check") == 0


def test_the_command_says_one_line(tmp_path):
    command = [sys.executable, "-m", "slipstream_client.cli", "compose", "--checkpoint"]
    command += [str(tmp_path), "--output", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "no config.json" in done.stderr


def test_the_committed_repository_is_what_compose_writes(monkeypatch):
    root = Path(__file__).parents[2] / "model_repository"
    monkeypatch.setattr(cli, "num_cores", lambda: 4)  # whatever machine this is
    assert run(root / "tensorrt_llm" / "1" / "checkpoint", root, "--check") == 0


def test_what_could_not_be_served_is_refused_before_anything_is_written(checkpoint, tmp_path):
    broken = tmp_path / "a-model"
    shutil.copytree(checkpoint, broken)
    (broken / "tokenizer.json").write_text("{}")
    with pytest.raises(UnsupportedTokenizerError, match=r"tokenizer\.json"):
        run(broken, tmp_path / "models")
    shutil.copy(checkpoint / "tokenizer.json", broken)
    edit_config(broken, intermediate_size=96)
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight is \[64, 64\], not \[96, 64\]"):
        run(broken, tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_what_the_model_cannot_do_is_refused_before_anything_is_written(tmp_path, capsys):
    """By the checks of the engine's start: a family's, and on a GPU what its kernels take."""
    gemma = save_model(make_model("gemma3", head_dim=272), tmp_path / "gemma")
    with pytest.raises(ConfigError, match="has windows of its own"):
        run(gemma, tmp_path / "models", "--attention-window", "64")
    assert not (tmp_path / "models").exists()
    edit_config(gemma, unk_token_id=3)
    run(gemma, tmp_path / "models")
    out = capsys.readouterr().out
    assert "config.json: ignored, as by transformers' Gemma3ForCausalLM: " in out
    assert "unk_token_id" in out
    if not torch.cuda.is_available():
        assert "not on a GPU: device = 'cuda' with heads of 272" in out
