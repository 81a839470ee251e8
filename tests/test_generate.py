"""``cohort generate``: what it samples, shows and writes, and what it refuses before the model is loaded."""

import datetime
import inspect
import io
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from cohort.cli import main
from cohort.config import DataConfig, ModelConfig, RolloutConfig
from cohort.data import PromptSet
from cohort.environments import Step
from cohort.generate import run as run_module
from cohort.generate.run import InOrder, TextStream, record, write_stdout
from cohort.policy import load_policy, read_config
from cohort.rollout import LocalEngine, Purpose, RNGKey, Sampling, local_engine
from cohort.rollout.trajectory import decode
from cohort.runs.durable import as_json
from cohort.types import Completion, FinishReason, Group
from tests import warm
from tests.conftest import DEMO_MODEL
from tests.data.templates import byte_tokenizer
from tests.environments import test_training as episodes
from tests.test_cli import model_folder  # noqa: F401  (a fixture)

MODEL = str(DEMO_MODEL)


QUESTIONS = ["3478+5869", "1111+2222", "98+7", "1+1", "4444+5555"]


@pytest.fixture(scope="module")
def engine(demo_tokenizer):
    policy = load_policy(MODEL, ModelConfig(device="cpu", precision="float32"), read_config(MODEL))
    return local_engine(policy, demo_tokenizer, RolloutConfig())


def sampled(engine, contents, n=1, seed=0, chat=True, **sampling):
    rows = [{"prompt": content} for content in contents]
    prompts = PromptSet(rows, engine.tokenizer, DataConfig(format="chat" if chat else "auto"))[:]
    settings = Sampling(**{"max_completion_length": 24} | sampling)
    return [group.completions for group in engine.generate(prompts, n, settings, RNGKey(seed, 0, Purpose.EVAL))]


def run(*arguments):
    return main(["generate", MODEL, "--precision", "float32", "--max-tokens", "24", *arguments])


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def prompts_file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(QUESTIONS) + "\n\n")
    return path


def test_one_completion_is_streamed(engine, capsys, monkeypatch):
    pieces = []
    monkeypatch.setattr(run_module, "write_stdout", pieces.append)
    assert run("3478+5869", "--chat", "--seed", "3") == 0
    ((expected,),) = sampled(engine, ["3478+5869"], seed=3)
    assert "".join(pieces) == expected.text + "\n"
    assert len(pieces) == len(expected.token_ids) + 1  # one piece per token, and the line break
    assert expected.finish_reason == "length"
    output = capsys.readouterr()
    assert output.out == ""
    for words in (
        "sampler: lean",
        "sampling: temperature 1, top-k off, top-p off, min-p off, repetition penalty off, no grammar, stop strings none",
        "0 to 24 tokens, seed 3\nend tokens: '<|end|>' (1)",
        f"1 completion ({expected.finish_reason} 1), {len(expected.token_ids)} tokens in ",
    ):
        assert words in output.err


def test_quiet_and_the_terminal(engine, capsys):
    assert run("3478+5869", "--quiet", "--temperature", "0") == 0
    ((expected,),) = sampled(engine, ["3478+5869"], chat=False, temperature=0)
    output = capsys.readouterr()
    assert (output.out, output.err) == (expected.text + "\n", "")
    assert run("3478+5869", "--chat") == 0
    assert not {"hint", "unknown"} & set(capsys.readouterr().err.replace(":", " ").split())
    assert run("add 1+2", "--chat") == 0  # "add" is not in the demo's vocabulary
    assert "warning: 1 of 7 tokens of the prompts are the unknown token" in capsys.readouterr().err
    assert run("3478+5869") == 0
    assert "hint: the model has a chat template; --chat" in capsys.readouterr().err


def test_several_completions_are_printed_in_order(engine, capsys):
    prompts, expected = ["98+7", "3478+5869"], ""
    assert run(*prompts, "--n", "2", "--chat", "--batch-size", "1") == 0
    for index, (prompt, group) in enumerate(zip(prompts, sampled(engine, prompts, n=2), strict=True)):
        for sample, one in enumerate(group):
            head = f"--- prompt {index} {prompt!r}, completion {sample}"
            expected += f"{head} ({one.finish_reason}, {len(one.token_ids)} tokens)\n{one.text}\n\n"
    assert capsys.readouterr().out == expected


def test_a_file_of_prompts_to_a_file_of_completions(engine, capsys, tmp_path, prompts_file):
    out = tmp_path / "out.jsonl"
    arguments = ["--prompts", str(prompts_file), "--n", "3", "--chat", "--top-k", "4", "--output", str(out)]
    assert run(*arguments) == 0
    output = capsys.readouterr()
    assert output.out == ""
    assert "15 completions" in output.err
    groups = sampled(engine, QUESTIONS, n=3, top_k=4)
    assert lines(out) == [
        {
            "prompt": QUESTIONS[index],
            "prompt_index": index,
            "sample_index": sample,
            "text": one.text,
            "token_ids": list(one.token_ids),
            "logps": pytest.approx(one.sampler_logps, abs=1e-5),  # other shapes: float32 rounding
            "full_logps": pytest.approx(one.full_logps, abs=1e-5),
            "finish_reason": one.finish_reason,
        }
        for index, group in enumerate(groups)
        for sample, one in enumerate(group)
    ]
    assert run(*arguments) == 2
    assert f"--output {out} exists: give another file, or --overwrite" in capsys.readouterr().err
    assert run(*arguments, "--overwrite", "--seed", "1") == 0
    assert [line["token_ids"] for line in lines(out)] != [list(one.token_ids) for group in groups for one in group]


def test_other_prompts_and_the_batch_size_change_no_completion(engine, tmp_path, prompts_file, capsys):
    out, first = tmp_path / "out.jsonl", tmp_path / "first.jsonl"
    assert run("--prompts", str(prompts_file), "--chat", "--batch-size", "1", "--output", str(out)) == 0  # two calls
    assert [line["token_ids"] for line in lines(out)] == [list(one.token_ids) for (one,) in sampled(engine, QUESTIONS)]
    assert run(QUESTIONS[0], "98765+43210", "--chat", "--n", "2", "--output", str(first)) == 0
    assert lines(out)[0]["token_ids"] == lines(first)[0]["token_ids"]


def test_rows_keep_their_columns(engine, tmp_path, capsys):
    messages = [{"role": "user", "content": "98+7"}]
    rows = [{"q": messages, "answer": 105, "text": "mine", "row.text": "?"}, {"q": messages, "answer": None}]
    out = tmp_path / "out.jsonl"
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run("--prompts", str(tmp_path / "in.jsonl"), "--prompt-column", "q", "--output", str(out)) == 0
    first, second = lines(out)
    ((expected,), _) = sampled(engine, ["98+7"] * 2)
    assert first["text"] == expected.text
    assert first["prompt"] == messages
    assert (first["answer"], first["row.row.text"], first["row.text"]) == (105, "mine", "?")
    assert second["answer"] is None
    assert "hint" not in capsys.readouterr().err


def test_a_line_is_valid_json_for_every_row():
    completion = Completion.of_tokens((1,), (-0.5,), FinishReason.EOS, "x", 0)
    row = {"prompt": "p", "nan": [float("nan")], "day": datetime.date(2024, 1, 2), "inner": {"a": (1, None)}}
    line = json.loads(as_json(record(row, 0, 0, completion), default=str))
    assert (line["nan"], line["day"], line["inner"]) == ([None], "2024-01-02", {"a": [1, None]})
    assert "full_logps" not in line


def test_standard_input(engine, capsys, monkeypatch):
    ((expected,),) = sampled(engine, ["98+7"])
    for arguments in ([], ["-"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("98+7\n"))
        assert run("--chat", *arguments) == 0
        assert capsys.readouterr().out == expected.text + "\n"


def test_prompts_after_options_and_after_dashes(capsys):
    assert run("--n", "1", "98+7", "--seed", "1", "1+1", "--", "-5") == 0
    out = capsys.readouterr().out
    assert ["prompt 0 '98+7'" in out, "prompt 1 '1+1'" in out, "prompt 2 '-5'" in out] == [True] * 3
    assert run("98+7", "--temperatur", "1") == 2
    assert "Unknown option: --temperatur. Did you mean --temperature?" in capsys.readouterr().err


def test_sampling_flags_reach_the_engine(engine, capsys):
    flags = {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2}
    arguments = [text for name, value in flags.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    assert run("98+7", "--chat", *arguments, "--min-tokens", "20", "--stop", "5", "--stop", "x") == 0
    settings = flags | {"min_completion_length": 20, "stop": ("5", "x")}
    ((expected,),) = sampled(engine, ["98+7"], **settings)
    assert capsys.readouterr().out == expected.text + "\n"
    assert run("98+7", "--chat", "--prefix", "9+9=") == 0
    forced = tuple(engine.tokenizer("9+9=", add_special_tokens=False)["input_ids"])
    ((expected,),) = sampled(engine, ["98+7"], forced_ids=forced)
    assert capsys.readouterr().out == expected.text + "\n"
    assert expected.text.startswith("9+9=")


def test_grammars(engine, capsys, tmp_path, model_folder):  # noqa: F811
    pytest.importorskip("llguidance")
    assert run("98+7", "--regex", "[0-4]{3}") == 0
    ((expected,),) = sampled(engine, ["98+7"], chat=False, regex="[0-4]{3}")
    assert capsys.readouterr().out == expected.text + "\n"
    (tmp_path / "schema.json").write_text('{"type": "boolean"}')
    for schema in ('{"type": "boolean"}', str(tmp_path / "schema.json")):
        assert main(["generate", str(model_folder), "x", "--json-schema", schema, "--quiet"]) == 0
        assert capsys.readouterr().out.strip() in ("true", "false")


def test_without_max_tokens_the_context_is_the_limit(capsys, tmp_path):
    out = tmp_path / "out.jsonl"
    arguments = ["generate", MODEL, "1" * 250, "1" * 240, "--min-tokens", "5", "--output", str(out)]
    assert main(arguments) == 0
    assert "5 to 6 tokens, for other prompts up to 16, as the context allows" in capsys.readouterr().err
    assert [len(line["token_ids"]) <= most for line, most in zip(lines(out), (6, 16), strict=True)] == [True, True]


MISTAKES = {
    "no prompt": ([], "no prompt: give one or more as arguments"),
    "empty prompt": (["a", " "], "prompt 1 of the command line is empty"),
    "two stdins": (["-", "-"], "one prompt only"),
    "empty stop": (["a", "--stop", ""], "--stop must not be empty"),
    "n": (["a", "--n", "0"], 'Invalid value "0" for --n. Must be >= 1'),
    "seed": (["a", "--seed", "-1"], 'Invalid value "-1" for --seed. Must be >= 0'),
    "range": (["a", "--temperature", "-1"], "--temperature: input should be greater than or equal to 0, got -1.0"),
    "schema": (["a", "--json-schema", "no.json"], "--json-schema: cannot read no.json: No such file"),
    "limits": (["a", "--min-tokens", "25"], "--min-tokens (25) must be at most --max-tokens (24)"),
    "regex": (["1", "--regex", "("], "cannot be compiled"),
    "prefix outside the grammar": (["1", "--regex", "[0-4]+", "--prefix", "9"], "set --prefix that begin"),
    "prefix too long": (["1", "--prefix", "1" * 25], "--prefix must be at most --max-tokens (24) tokens"),
    "both": (["a", "--prompts", "good.txt"], "not both"),
    "no file": (["--prompts", "nope.txt"], "there is no prompts file nope.txt"),
    "no name of a data set": (["--prompts", "gsm8k"], "expected a .txt, .jsonl, .json, .csv or .parquet file"),
    "blank": (["--prompts", "blank.txt"], "blank.txt has no prompts"),
    "bytes": (["--prompts", "latin.txt"], "latin.txt, line 2: not UTF-8"),
    "column": (["--prompts", "rows.jsonl", "--prompt-column", "x"], "no column 'x'; the row has: prompt, system. Set"),
    "system twice": (["--prompts", "rows.jsonl", "--system", "s"], "has a system message of its own; unset --system"),
    "too long": (["1" * 250, "--chat"], "prompt 0 ('<|user|>111"),
    "too long for all": (["--prompts", "long.txt", "--max-tokens", "9"], "more than the model's context of 256"),
    "surrogate": (["a\udc80"], "the command line, row 0: the prompt is not UTF-8 text"),
    "surrogate stop": (["a", "--stop", "\udc80"], "--stop is not UTF-8 text"),
    "folder of output": (["a", "--output", "nowhere/o.jsonl"], "no folder nowhere"),
    "output a folder": (["a", "--output", "."], "is a folder"),
    "output the prompts": (["--prompts", "good.txt", "--output", "./good.txt", "--overwrite"], "the file of prompts"),
    "device": (["1", "--device", "xyz"], "--device 'xyz' cannot be used here"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_reported_before_the_model_is_loaded(mistake, tmp_path, capsys, monkeypatch):
    if mistake in ("regex", "prefix outside the grammar"):
        pytest.importorskip("llguidance")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("cohort.evaluation.model.load_policy", lambda *a, **k: pytest.fail("loaded"))
    Path("good.txt").write_text("1\n")
    Path("blank.txt").write_text("\n \n")
    Path("latin.txt").write_bytes(b"a\n\xe9b\n")
    Path("rows.jsonl").write_text(json.dumps({"prompt": [{"role": "system", "content": "x"}], "system": 1}) + "\n")
    Path("long.txt").write_text("1\n" + "1" * 250 + "\n")
    arguments, message = MISTAKES[mistake]
    assert run(*arguments) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.out == ""


def test_folders_that_are_not_models(tmp_path, capsys, monkeypatch):
    (tmp_path / "run" / "checkpoints" / "step-9").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-10").mkdir()
    assert main(["generate", str(tmp_path / "run"), "a"]) == 2
    assert "step-10" in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "nope"), "a"]) == 2
    assert "no model folder" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    assert run() == 2
    assert (
        "the prompt from standard input is empty: give a prompt as an argument, a file with --prompts,"
        in capsys.readouterr().err
    )


def test_ctrl_c_writes_the_completions_that_have_ended(tmp_path, capsys, monkeypatch, prompts_file):
    class Interrupting(run_module.Meter):
        shown = True

        def __setattr__(self, name, value):
            if (name, value) == ("tokens", 58):  # during the third and fourth completion
                os.kill(os.getpid(), signal.SIGINT)
            super().__setattr__(name, value)

    out, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    arguments = ["--prompts", str(prompts_file), "--chat", "--batch-size", "2"]
    assert run(*arguments, "--output", str(whole)) == 0
    monkeypatch.setattr(run_module, "Meter", Interrupting)
    assert run(*arguments, "--output", str(out)) == 130
    assert "interrupted" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    for got, expected in zip(lines(out), lines(whole), strict=True):
        assert got["token_ids"] == expected["token_ids"][: len(got["token_ids"])]
        assert (got["finish_reason"] == "cancelled") or got == expected
    assert [line["finish_reason"] for line in lines(out)].count("cancelled") == 3
    assert sorted(len(line["token_ids"]) > 0 for line in lines(out)) == [False, True, True, True, True]


def test_ctrl_c_in_a_stream(engine, capsys, monkeypatch):
    pieces = []

    def put(text):
        pieces.append(text)
        if len(pieces) == 5:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(run_module, "write_stdout", put)
    assert run("3478+5869", "--chat") == 130
    ((whole,),) = sampled(engine, ["3478+5869"])
    assert "".join(pieces) == decode(engine.tokenizer, whole.token_ids[:5]) + "\n"


def test_an_error_keeps_the_completions_that_have_ended(tmp_path, monkeypatch, prompts_file):
    def fail_at_the_second(self):
        self.ended = getattr(self, "ended", 0) + 1
        if self.ended == 3:
            raise RuntimeError("out of memory, say")

    monkeypatch.setattr(run_module.Meter, "count", fail_at_the_second)
    with pytest.raises(RuntimeError, match="out of memory"):
        run("--prompts", str(prompts_file), "--chat", "--output", str(tmp_path / "out.jsonl"))
    assert len(lines(tmp_path / "out.jsonl")) == 2


def test_completions_that_cannot_be_sampled_are_an_error(capsys, monkeypatch):
    def broken(self, prompts, count, *_):
        failed = Completion.of_tokens((5,), (-1.0,), FinishReason.ERROR, "5", 0)
        return [Group(prompt, (failed,) * count) for prompt in prompts]

    monkeypatch.setattr(LocalEngine, "generate", broken)
    assert run("1", "2") == 2
    output = capsys.readouterr()
    assert "2 of 2 completions could not be sampled" in output.err
    assert "prompt 1 '2' (error, 1 tokens)" in output.out


def test_a_closed_pipe_ends_quietly():
    process = warm.begin("generate", MODEL, "98+7", "--n", "40", "--chat", "--quiet", "--batch-size", "4")
    assert process.stdout.readline().startswith("--- completion 0 (")
    process.stdout.close()
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 141


def streamed(tokenizer, tokens):
    """The pieces of a stream; together they are the decoded text."""
    stream = TextStream(tokenizer)
    pieces = [stream.add(token) for token in tokens]
    pieces.append(stream.remainder(decode(tokenizer, tokens)))
    assert "".join(pieces) == decode(tokenizer, tokens)
    return pieces


def test_a_stream_holds_back_parts_of_characters():
    tokenizer = byte_tokenizer(bos=False)
    tokens = tokenizer("a€b😀")["input_ids"]
    assert streamed(tokenizer, tokens) == ["a", "", "", "€", "b", "", "", "", "😀", ""]
    end = tokenizer.eos_token_id
    assert streamed(tokenizer, [*tokens[:3], end]) == ["a", "", "", "", "\ufffd"]  # cut inside a character
    long = tokenizer("naïve café 日本語のテキスト 👩‍👩‍👧 " * 8)["input_ids"]
    assert max(map(len, streamed(tokenizer, long))) == 1
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):  # bytes that are not valid UTF-8
        streamed(tokenizer, torch.randint(len(tokenizer), (90,), generator=generator).tolist())


def test_a_stream_over_byte_fallback_and_leading_spaces():
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}, "▁a": 257, "b": 258, "▁": 259}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    e = [1 + 0xC3, 1 + 0xA9]
    assert streamed(fast, [257, 258, *e, 257, 257]) == ["a", "b", "", "", "é a", " a", ""]
    # The decoder treats consecutive bytes as one unit: an incomplete character invalidates the one before it.
    assert streamed(fast, [258, *e, e[0]]) == ["b", "", "", "", "\ufffd" * 3]
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        streamed(fast, [257 + i if i < 3 else e[i % 2] for i in torch.randint(5, (90,), generator=generator).tolist()])


def test_completions_are_written_in_order():
    written = []
    results = InOrder(6, 2, lambda index, sample, completion: written.append((index, sample)))
    one = Completion.of_tokens((1, 2), (0.0, 0.0), FinishReason.EOS, "", 0)
    for position in ((0, 1), (2, 0), (0, 0), (0, 0), (1, 1)):
        results.add(*position, one)
    assert written == [(0, 0), (0, 1)]
    results.flush()
    assert written == [(0, 0), (0, 1), (1, 1), (2, 0)]
    assert results.reasons[FinishReason.EOS] == 4
    assert results.summary(2.0) == "6 completions (eos 4), 8 tokens in 2.00 s: 4 tokens/s"


def test_control_characters_are_not_sent_to_a_terminal(capsys, monkeypatch):
    write_stdout("\x1b[2Ja\tb\n")
    assert capsys.readouterr().out == "\x1b[2Ja\tb\n"
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True)
    write_stdout("\x1b[2Ja\tb\n")
    assert capsys.readouterr().out == "␛[2Ja\tb\n"


class Countdown:
    """An environment of three turns."""

    def reset(self, start):
        self.left = start
        return f" Count down from {start}."

    def step(self, text):
        self.left -= 1
        return Step(f"{self.left} left", reward=1.0, done=self.left == 0)


def test_tools_and_environments(tmp_path, capsys):
    """Random models are made to write a call or a digit."""
    model, folder = episodes.model(), str(tmp_path / "model")
    model.save_pretrained(folder)
    episodes.FAMILY.tokenizer.save_pretrained(folder)
    (tmp_path / "mine.py").write_text(inspect.getsource(episodes.add))
    common = ["generate", folder, "--max-tokens", "200", "--quiet", "--n", "4", "--output", str(tmp_path / "out.jsonl")]
    tool = ["--tools", f"{tmp_path}/mine.py:add", "calculator", "--regex", episodes.CALL, "--max-turns", "3"]
    assert main([*common, "What is 2 plus 3?", *tool]) == 0
    found = lines(tmp_path / "out.jsonl")
    answers = [message for line in found for message in line["messages"] if message["role"] == "tool"]
    assert answers
    assert all(int(message["content"]) in range(19) for message in answers)
    for line in found:
        assert len(line["token_ids"]) == len(line["logps"])
        assert (None in line["logps"]) == any(message["role"] == "tool" for message in line["messages"][:-1])

    (tmp_path / "rows.jsonl").write_text('{"prompt": "Go.", "start": 3}\n')
    environment = [
        "--prompts",
        str(tmp_path / "rows.jsonl"),
        "--environment",
        f"{__name__}:Countdown",
        "--regex",
        "[0-9]",
    ]
    assert main([*common, *environment, "--overwrite"]) == 0
    for line in lines(tmp_path / "out.jsonl"):
        assert [message["content"] for message in line["messages"][1::2]] == ["2 left", "1 left", "0 left"]
        assert line["environment_reward"] == 3
    assert main(["generate", folder, "x", "--tools", "nothing"]) == 2
    assert "unknown tool 'nothing'" in capsys.readouterr().err
