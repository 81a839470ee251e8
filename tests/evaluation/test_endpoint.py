"""`cohort eval --endpoint` and `cohort generate --endpoint`: a baseline behind an OpenAI-compatible server."""

from __future__ import annotations

import json
import threading
import time
from contextlib import nullcontext
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cohort.cli import main
from cohort.errors import ConfigError, EngineError
from cohort.evaluation import endpoint
from cohort.evaluation.endpoint import EndpointSampler, byte_tokenizer
from cohort.rollout import RNGKey, Sampling, Watch
from cohort.rollout.served.http import Client
from cohort.types import FinishReason, Prompt


class Api:
    """A server of the API. ``answer`` gives the status and the answer to a request; ``asked`` are path, body, key."""

    def __init__(self):
        self.asked, self.answer = [], lambda number, path, body: (200, chat("1"))
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with api.lock:
                    api.asked.append((self.path, body, self.headers.get("Authorization")))
                    number = len(api.asked)
                status, answer, *headers = api.answer(number, self.path, body)
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                try:
                    self.send_response(status)
                    for header in [("Content-Length", str(len(content))), *headers]:
                        self.send_header(*header)
                    self.end_headers()
                    self.wfile.write(content)
                except OSError:  # the client has gone
                    return

            def log_message(self, *arguments):
                pass

        self.lock = threading.Lock()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    def close(self):
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def api(monkeypatch):
    monkeypatch.setattr(endpoint, "WAIT_SECONDS", 0.0)
    made = Api()
    yield made
    made.close()


def chat(text, reason="stop", tokens=3):
    message = {"role": "assistant", "content": text}
    return {"choices": [{"message": message, "finish_reason": reason}], "usage": {"completion_tokens": tokens}}


def text(content, reason="stop", tokens=3):
    return {"choices": [{"text": content, "finish_reason": reason}], "usage": {"completion_tokens": tokens}}


ROWS = [{"prompt": [{"role": "user", "content": f"{n}+1"}], "answer": str(n + 1)} for n in range(4)]


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "texts.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "r.py").write_text(
        "def right(completion, answer):\n    text = completion if isinstance(completion, str) else completion\n"
        "    return float(str(text).strip() == answer)\n"
        "def ids(completion_ids, **_):\n    return [1.0 for _ in completion_ids]\n"
    )


def run(api, *more, rows="rows.jsonl", reward="r.py:right"):
    words = ["eval", "their-model", "--endpoint", api.url, "--data", rows, "--reward", reward, "--max-tokens", "16"]
    return main([*words, "--json", "found.json", "--overwrite", *more])


def metrics():
    with open("found.json") as file:  # noqa: PTH123 - relative to the folder of the test
        return json.load(file)["metrics"][0]


def test_a_baseline_is_scored_as_a_model_is(api, files, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "k3y")
    api.answer = lambda number, path, body: (200, chat(str(int(body["messages"][0]["content"][0]) + 1), tokens=5))
    wrong = api.answer
    api.answer = lambda n, path, body: (
        (200, chat("9")) if body["messages"][0]["content"] == "3+1" else wrong(n, path, body)
    )
    assert run(api, "--n", "2", "--temperature", "0.7", "--seed", "3") == 0
    found = metrics()
    assert found["eval/reward/mean"] == 0.75
    assert (found["eval/length/min"], found["eval/length/max"]) == (3, 5)
    assert len(api.asked) == 8
    path, body, key = api.asked[0]
    assert (path, key) == ("/v1/chat/completions", "Bearer k3y")
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("their-model", 0.7, 16)
    assert set(body) == {"model", "messages", "temperature", "max_tokens", "seed"}
    assert len({body["seed"] for _, body, _ in api.asked}) == 8
    assert "k3y" not in capsys.readouterr().err


def test_text_goes_to_the_route_for_text(api, files):
    api.answer = lambda number, path, body: (200, text("2"))
    assert run(api, "--data.format", "text", "--top-k", "5", "--top-p", "0.9", rows="texts.jsonl") == 0
    path, body, key = api.asked[0]
    assert (path, key, body["prompt"], body["top_k"], body["top_p"]) == ("/v1/completions", None, "1+1=", 5, 0.9)
    assert metrics()["eval/reward/mean"] == 1.0


def prompts(count):
    return [Prompt(n, n, (1,), "", [{"role": "user", "content": str(n)}], {}) for n in range(count)]


def sampler(api):
    return EndpointSampler(Client(api.url, setting="--endpoint", public=True), "m", 4)


def test_a_busy_server_is_asked_again(api):
    api.answer = lambda number, path, body: (429 if number < 3 else 200, chat("x"))
    (group,) = sampler(api).generate(prompts(1), 1, Sampling(4), RNGKey(0, 0))
    assert len(api.asked) == 3
    assert group.completions[0].text == "x"
    assert len({json.dumps(body) for _, body, _ in api.asked}) == 1


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_a_busy_server_says_when_to_ask_again(api, monkeypatch, form):
    monkeypatch.setattr(endpoint, "WAIT_SECONDS", 20.0)
    times = []

    def answer(number, path, body):
        times.append(time.time())
        if number == 1:  # a date has whole seconds, so it may be up to one less
            after = "1" if form == "seconds" else formatdate(times[0] + 2, usegmt=True)
            return 429, {}, ("Retry-After", after)
        return 200, chat("x")

    api.answer = answer
    (group,) = sampler(api).generate(prompts(1), 1, Sampling(4), RNGKey(0, 0))
    assert group.completions[0].text == "x"
    assert 0.9 < times[1] - times[0] < 5


def test_a_server_that_asks_for_hours_is_not_waited_for(api):
    api.answer = lambda *_: (429, {"error": {"message": "quota"}}, ("Retry-After", "7200"))
    with pytest.raises(EngineError, match="quota.*asks to wait for 7,200 s"):
        sampler(api).generate(prompts(1), 1, Sampling(4), RNGKey(0, 0))
    assert len(api.asked) == 1


def test_the_limit_of_tokens_has_the_name_that_a_model_takes(api):
    refusal = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens'."

    def answer(number, path, body):
        return (400, {"error": {"message": refusal}}) if "max_tokens" in body else (200, chat("x"))

    api.answer, one = answer, sampler(api)
    for _ in range(2):
        groups = one.generate(prompts(1), 1, Sampling(4), RNGKey(0, 0))
        assert groups[0].completions[0].text == "x"
    refused, *taken = [body for _, body, _ in api.asked]
    assert len(taken) == 2  # learned once, and used from then on
    assert all({**body, "max_tokens": 4} == {**refused, "max_completion_tokens": 4} for body in taken)


def test_reasons_and_texts(api):
    answers = [chat("a"), chat("b", "length"), chat("", "content_filter"), chat(None)]
    api.answer = lambda number, path, body: (200, answers[int(body["messages"][0]["content"])])
    groups = sampler(api).generate(prompts(4), 1, Sampling(4), RNGKey(0, 0))
    found = [(g.completions[0].text, g.completions[0].finish_reason) for g in groups]
    eos, length, error = FinishReason.EOS, FinishReason.LENGTH, FinishReason.ERROR
    assert found == [("a", eos), ("b", length), ("", error), ("", eos)]


@pytest.mark.parametrize(
    ("more", "expected", "reason"),
    [
        ({}, "a", FinishReason.EOS),
        ({"stop_reason": None}, "a", FinishReason.EOS),
        ({"stop_reason": 2}, "a", FinishReason.EOS),
        ({"stop_reason": "</s>"}, "a</s>", FinishReason.STOP),
        ({"matched_stop": "END"}, "aEND", FinishReason.STOP),
        ({"matched_stop": "other"}, "a", FinishReason.EOS),
    ],
    ids=["OpenAI", "end token", "end token by id", "vLLM", "SGLang", "not ours"],
)
def test_a_stop_string_that_the_server_names_is_part_of_the_text(api, more, expected, reason):
    answer = chat("a", tokens=4)
    answer["choices"][0] |= more
    api.answer = lambda *_: (200, answer)
    (group,) = sampler(api).generate(prompts(1), 1, Sampling(4, stop=("</s>", "END")), RNGKey(0, 0))
    (completion,) = group.completions
    assert (completion.text, completion.finish_reason, completion.num_tokens) == (expected, reason, 4)
    assert api.asked[0][1].keys() == {"model", "messages", "temperature", "max_tokens", "seed", "stop"}


def test_what_a_server_may_not_do_is_named(api, files, capsys):
    assert run(api, "--top-k", "5", "--rollout.stop", '["x"]') == 0
    found = capsys.readouterr().err
    assert "fields that are not OpenAI's, which some servers ignore: top_k\n" in found
    assert "texts lack the stop string" in found
    assert run(api, "--top-p", "0.5") == 0
    found = capsys.readouterr().err
    assert "not OpenAI's" not in found
    assert "stop string that" not in found


def test_completions_that_a_server_cut_are_no_result(api, files, capsys):
    api.answer = lambda *_: (200, chat("", "content_filter"))
    assert run(api) == 2
    assert "no completion of their-model can be scored: the server cut them all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (
            (404, {"error": {"message": "no model their-model"}}),
            ConfigError,
            "no model their-model. The endpoint refuses",
        ),
        ((401, {"error": {"message": "bad key"}}), ConfigError, "status 401: bad key"),
        ((500, {}), EngineError, "status 500: .*after 6 attempts"),
        ((200, {"choices": []}), EngineError, "unexpected answer .*after 6 attempts"),
        ((200, chat("x", tokens=-1)), EngineError, "unexpected answer .*completion_tokens"),
        ((200, b"<html>"), EngineError, "the answer is not JSON"),
        ((200, {"choices": [{"text": "x", "finish_reason": "stop"}]}), EngineError, "unexpected answer .*usage"),
    ],
)
def test_answers_that_cannot_be_used(api, answer, error, message):
    api.answer = lambda *_: answer
    with pytest.raises(error, match=message):
        sampler(api).generate(prompts(2), 2, Sampling(4), RNGKey(0, 0))


def test_cancelling_ends_what_is_under_way(api):
    hold = threading.Event()

    def slow(number, path, body):
        if number > 2:
            hold.wait(20)
        return 200, chat("x")

    api.answer, ended = slow, []
    watch = Watch(on_completion=lambda *one: ended.append(one), cancelled=lambda: len(ended) >= 2)
    groups = sampler(api).generate(prompts(3), 2, Sampling(4), RNGKey(0, 0), watch)
    hold.set()
    reasons = [c.finish_reason for group in groups for c in group.completions]
    assert reasons.count(FinishReason.CANCELLED) >= 1
    assert reasons.count(FinishReason.EOS) >= 2


@pytest.mark.parametrize("status", [None, 500], ids=["hangs", "fails"])
@pytest.mark.parametrize("by", ["cancelled", "ctrl-c", "refused"])
def test_what_ends_sampling_ends_it_at_once(api, monkeypatch, status, by):
    """A request that was cut off is not sent again, and none waits for its next attempt."""
    monkeypatch.setattr(endpoint, "WAIT_SECONDS", 20.0)
    monkeypatch.setattr(endpoint, "ATTEMPTS", 2)
    hold = threading.Event()

    def answer(number, path, body):
        if by == "refused" and body["messages"][0]["content"] == "0":
            while len(api.asked) < 3:
                time.sleep(0.01)
            return 404, {}
        if status is None:
            hold.wait(20)
        return status or 200, {}

    def asked():
        if len(api.asked) < 3:
            return False
        if by == "ctrl-c":
            raise KeyboardInterrupt
        return by == "cancelled"

    api.answer, begun = answer, time.monotonic()
    expected = {"ctrl-c": pytest.raises(KeyboardInterrupt), "refused": pytest.raises(ConfigError, match="status 404")}
    with expected.get(by, nullcontext()):
        groups = sampler(api).generate(prompts(3), 1, Sampling(4), RNGKey(0, 0), Watch(cancelled=asked))
        assert {group.completions[0].finish_reason for group in groups} == {FinishReason.CANCELLED}
    assert time.monotonic() - begun < 10, "half of what one more attempt, or an answer, would take"
    hold.set()
    assert len(api.asked) == 3


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--reward", "r.py:ids"), "ids reads token ids, and an endpoint returns texts"),
        (("--environment.tools", "calculator"), "leave out tools and environments"),
        (("--checkpoint", "best"), "--checkpoint would have no effect with --endpoint"),
        (("--engine", "vllm", "--device", "cpu"), "--engine, --device would have no effect"),
        (("--rollout.engine", "local"), "--rollout.engine would have no effect"),
        (("--model.precision", "float32"), "--model.precision would have no effect"),
        (("--data.max_prompt_length", "5"), "data.max_prompt_length would have no effect"),
        (("--data.chat_template", "{{ messages }}"), "data.chat_template would have no effect"),
        (("--endpoint", "ftp://x"), "--endpoint: expected an address such as 'https://api.openai.com/v1'"),
    ],
)
def test_what_an_endpoint_cannot_do_is_refused(api, files, capsys, more, message):
    assert run(api, *more, reward=more[1] if more[0] == "--reward" else "r.py:right") == 2
    assert message in capsys.readouterr().err
    assert not api.asked


def test_the_length_of_completions_has_to_be_given(api, files, capsys):
    assert main(["eval", "m", "--endpoint", api.url, "--data", "rows.jsonl", "--reward", "r.py:right"]) == 2
    assert "--endpoint needs --max-tokens" in capsys.readouterr().err


def test_public_addresses_are_for_endpoints():
    one = Client("https://api.example.com/v1/", setting="--endpoint", public=True)
    assert (one.url, one.port, one.secure) == ("https://api.example.com:443/v1", 443, True)
    with pytest.raises(ConfigError, match="server.url: expected an address"):
        Client("https://api.example.com/v1")


def test_the_tokenizer_of_prompts_knows_every_text():
    tokenizer = byte_tokenizer()
    words = "añ 語\n\t"
    assert tokenizer.decode(tokenizer(words)["input_ids"]) == words
    assert len(tokenizer) == 256


def complete(api, *words):
    return main(["generate", "their-model", *words, "--endpoint", api.url])


def test_generate_shows_what_an_endpoint_writes(api, files, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "k3y")
    api.answer = lambda *_: (200, chat("two"))
    assert complete(api, "1+1", "--chat", "--system", "add", "--max-tokens", "8", "--temperature", "0.5") == 0
    out, err = capsys.readouterr()
    assert out == "two\n"
    assert f"model: their-model at {api.url}" in err
    assert "end tokens" not in err
    ((path, body, key),) = api.asked
    assert (path, key) == ("/v1/chat/completions", "Bearer k3y")
    assert body["messages"] == [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1"}]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("their-model", 8, 0.5)
    assert "k3y" not in err


def test_generate_writes_no_tokens_that_it_does_not_know(api, files, tmp_path):
    api.answer = lambda number, path, body: (200, text(body["prompt"] + "!", tokens=3))
    assert complete(api, "a", "b", "--n", "2", "--max-tokens", "8", "--output", "out.jsonl") == 0
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    found = [(one["prompt"], one["sample_index"], one["text"], one["finish_reason"]) for one in lines]
    assert found == [("a", 0, "a!", "eos"), ("a", 1, "a!", "eos"), ("b", 0, "b!", "eos"), ("b", 1, "b!", "eos")]
    assert {(one["token_ids"], one["logps"]) for one in lines} == {(None, None)}
    assert {path for path, _, _ in api.asked} == {"/v1/completions"}


def test_generate_and_eval_send_the_same_requests(api, files):
    assert run(api, "--n", "2", "--seed", "3") == 0
    of_eval = sorted(json.dumps(body) for _, body, _ in api.asked)
    api.asked.clear()
    words = ("--prompts", "rows.jsonl", "--n", "2", "--seed", "3", "--max-tokens", "16", "--output", "out.jsonl")
    assert complete(api, *words) == 0
    assert sorted(json.dumps(body) for _, body, _ in api.asked) == of_eval


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--max-tokens", "8", "--prefix", "x"), "--prefix would have no effect with --endpoint"),
        (("--max-tokens", "8", "--cache-tokens", "9"), "--cache-tokens would have no effect"),
        (("--max-tokens", "8", "--tools", "calculator"), "leave out tools and environments"),
        ((), "--endpoint needs --max-tokens"),
    ],
)
def test_generate_refuses_what_an_endpoint_cannot_do(api, files, capsys, more, message):
    assert complete(api, "x", *more) == 2
    assert message in capsys.readouterr().err
    assert not api.asked


def test_generate_says_which_completions_a_server_cut(api, files, capsys):
    api.answer = lambda number, path, body: (200, text("x", "content_filter" if body["prompt"] == "b" else "stop"))
    assert complete(api, "a", "b", "--max-tokens", "8") == 2
    assert "1 of 2 completions could not be sampled to their end" in (found := capsys.readouterr().err)
    assert "the server cut them" in found
