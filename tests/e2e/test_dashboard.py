"""The dashboard in a real browser, with a real engine."""

import base64
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import warm_python
from browser import Browser, browser
from default_model import default_model
from servers import Server
from tiny_audio_models import make_qwen2_audio
from tiny_media import make_llava, picture
from tiny_whisper import make_whisper, wav, waveform
from waiting import join, wait_until

from octavo.frontend.receipts.saved import read_answers

pytestmark = pytest.mark.model

ENGINE = ("--max-model-len", "512", "--kv-cache-memory-bytes", "64M")


@pytest.fixture(scope="module")
def server():
    running = Server(default_model(), *ENGINE, "--served-model-name", "small", "same")
    try:
        yield running.wait_until_ready()
    finally:
        running.close()


@pytest.fixture(scope="module")
def page():
    with browser() as opened:
        yield opened


def ask(page: Browser, text: str) -> None:
    page.type_into("#input", text)
    page.press_enter()


def fill(page: Browser, **values: str) -> None:
    """Put values into the fields of the parameters."""
    for name, value in values.items():
        page.run(f"document.querySelector('#{name}').value = {value!r}")


def answered(page: Browser, count: int) -> None:
    """Wait until so many answers are there and none is on its way."""
    page.wait_for(
        f"document.querySelectorAll('.message.assistant').length === {count} && document.querySelector('#stop').hidden"
    )


def test_a_conversation_streams_and_goes_on(server, page):
    page.open(server.url)
    page.wait_for("document.querySelector('#model')?.value === 'small'")
    fill(page, temperature="0", max_tokens="12")
    ask(page, "Name a colour.")
    answered(page, 1)
    whole = server.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Name a colour."}], "temperature": 0, "max_tokens": 12},
    ).json()["choices"][0]["message"]["content"]
    assert page.run("document.querySelector('.message.assistant .text').textContent") == whole
    ask(page, "Another one.")
    answered(page, 2)
    assert page.run("document.querySelectorAll('.message').length") == 4
    assert "tokens in" in page.run("document.querySelector('#stats').textContent")
    assert page.problems == []


def test_probabilities_are_shown_on_the_tokens(server, page):
    page.open(server.url + "/?logprobs")
    page.wait_for("document.querySelector('#model')?.value === 'small'")
    fill(page, max_tokens="8")
    page.run("document.querySelector('#logprobs').click()")
    ask(page, "Count to five.")
    answered(page, 1)
    tokens = page.run("[...document.querySelectorAll('.token')].map((token) => token.textContent)")
    assert 1 < len(tokens) <= 8
    page.run("document.querySelector('.token').dispatchEvent(new MouseEvent('mouseenter'))")
    shown = page.run("[...document.querySelectorAll('#popover tr')].map((row) => row.lastChild.textContent)")
    assert 5 <= len(shown) <= 6
    assert all(chance.endswith(" %") for chance in shown)


def test_an_answer_can_be_stopped(server, page):
    page.open(server.url + "/?stop")
    page.wait_for("document.querySelector('#model')?.value === 'small'")
    fill(page, max_tokens="400", extra='{"ignore_eos": true}')
    ask(page, "Tell a long story.")
    page.wait_for("document.querySelector('.message.assistant .text')?.textContent.length > 20")
    page.run("document.querySelector('#stop').click()")
    answered(page, 1)
    assert "ended by you" in page.run("document.querySelector('.message.assistant .who').textContent")


def test_a_rejection_is_shown_where_the_answer_would_be(server, page):
    page.open(server.url + "/?error")
    page.wait_for("document.querySelector('#model')?.value === 'small'")
    fill(page, top_p="7")
    ask(page, "Hello.")
    assert "top_p" in page.wait_for("document.querySelector('.message.failed .error')?.textContent")
    fill(page, top_p="1", schema="{")
    ask(page, "Hello.")
    assert "schema" in page.wait_for("document.querySelectorAll('.message.failed .error')[1]?.textContent").lower()
    page.problems.clear()  # the rejected request itself is an entry of the console


@contextmanager
def visited(page: Browser, model: Path, *flags: str) -> Iterator[Server]:
    """Yield a server of its own with its page open; the page is left before the server ends."""
    running = Server(model, *flags, "--served-model-name", "media")
    try:
        page.open(running.wait_until_ready().url)
        page.wait_for("document.querySelector('#model')?.value === 'media'")
        yield running
        page.open("about:blank")
    finally:
        running.close()


def drop(page: Browser, name: str, kind: str, content: bytes) -> None:
    """Drop a file on the chat."""
    page.run(
        f"""(() => {{
            const bytes = Uint8Array.from(atob({base64.b64encode(content).decode()!r}), (char) => char.charCodeAt(0));
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File([bytes], {name!r}, {{ type: {kind!r} }}));
            document.querySelector("#talk").dispatchEvent(new DragEvent("drop", {{ dataTransfer }}));
        }})()"""
    )


def test_an_image_goes_with_the_next_message(page, tmp_path_factory):
    file = io.BytesIO()
    picture(1).save(file, "png")
    png = file.getvalue()
    with visited(page, make_llava(tmp_path_factory.mktemp("llava")), *ENGINE) as running:
        fill(page, temperature="0", max_tokens="8", extra='{"ignore_eos": true}')
        drop(page, "notes.txt", "text/plain", b"no picture")
        assert "notes.txt" in page.wait_for("document.querySelector('#stats').textContent")
        drop(page, "broken.png", "image/png", b"no picture either")
        page.wait_for("document.querySelectorAll('#attached img').length === 1")
        ask(page, "What is this?")
        assert "messages[0].content[0]" in page.wait_for("document.querySelector('.failed .error')?.textContent")
        page.problems.clear()  # the refused request and the broken image are entries of the console
        page.type_into("#input", "What is this?")
        drop(page, "a.png", "image/png", png)
        page.press_enter()  # while the file is read
        answered(page, 2)
        url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
        body = {"messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 8, "ignore_eos": True}
        answer = running.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
        assert page.run("document.querySelectorAll('.message.assistant .text')[1].textContent") == answer
        assert page.run("document.querySelectorAll('.message.user')[1].querySelector('img').naturalWidth") == 44
        assert page.run("document.querySelectorAll('#attached img').length") == 0
        page.run("document.querySelector('#tab-engine').click()")
        numbers = page.wait_for("document.querySelector('#numbers')?.textContent")
        assert "encoder cache used" in numbers and "1images and audio clips encoded" in numbers, numbers
        assert page.problems == []


def test_a_sound_is_written_down(page, tmp_path_factory):
    speech = wav(waveform(1))
    with visited(page, make_whisper(tmp_path_factory.mktemp("whisper"))) as running:
        drop(page, "a.wav", "audio/wav", speech)
        page.wait_for("document.querySelector('#stats').textContent === '1 s of audio'")
        form = {"files": {"file": ("a.wav", speech)}, "data": {"model": "media"}}
        written = httpx.post(running.url + "/v1/audio/transcriptions", **form, timeout=60).json()["text"]
        assert page.run("document.querySelector('.message.assistant .text').textContent") == written != ""
        assert page.problems == []


def test_a_sound_goes_with_the_next_message(page, tmp_path_factory):
    speech = wav(waveform(1))
    with visited(page, make_qwen2_audio(tmp_path_factory.mktemp("qwen2_audio")), *ENGINE) as running:
        fill(page, temperature="0", max_tokens="8", extra='{"ignore_eos": true}')
        drop(page, "a.wav", "audio/wav", speech)
        assert "a.wav" in page.wait_for("document.querySelector('#attached').textContent")
        ask(page, "What is this?")
        answered(page, 1)
        url = f"data:audio/wav;base64,{base64.b64encode(speech).decode()}"
        parts = [{"type": "audio_url", "audio_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
        body = {"messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 8, "ignore_eos": True}
        answer = running.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
        assert page.run("document.querySelector('.message.assistant .text').textContent") == answer
        assert page.wait_for("document.querySelector('.message.user audio').duration > 0.7")
        assert page.problems == []


def compare(page: Browser, question: str) -> str:
    """Ask both sides and return what the page says about their answers."""
    page.run(f"document.querySelector('#question-text').value = {question!r}")
    page.run("document.querySelector('#ask-both').click()")
    page.wait_for("document.querySelector('#ask-both').hidden")
    page.wait_for("!document.querySelector('#ask-both').hidden")
    return page.run("document.querySelector('#verdict').textContent")


def fill_side(page: Browser, side: str, **values: str) -> None:
    for name, value in values.items():
        page.run(f"document.querySelector('#side-{side} [data-field={name}]').value = {value!r}")


def test_the_same_seed_gives_the_same_bits_on_both_sides(server, page, tmp_path):
    page.open(server.url + "/?same#compare")
    page.wait_for("document.querySelector('#side-b [data-field=model]')?.options.length === 2")
    fill_side(page, "a", temperature="1", max_tokens="24", extra='{"ignore_eos": true}')
    page.run("document.querySelector('#copy-side').click()")
    fill_side(page, "b", model="same")  # another name of the same weights
    assert compare(page, "Tell me about the sea.") == "Identical, bit for bit: 24 tokens and their logprobs"
    assert page.run("document.querySelector('#verdict').className") == "same"
    shown = page.run("[...document.querySelectorAll('.shown .text')].map((text) => text.textContent)")
    assert len(shown) == 2 and shown[0] == shown[1] != ""

    page.save_downloads_to(tmp_path)
    page.run("document.querySelector('#side-b .save').click()")
    wait_until(lambda: list(tmp_path.glob("octavo-receipt-*.json")))
    (saved,) = tmp_path.iterdir()
    done = warm_python.run(["-m", "octavo", "verify", saved, "--model", default_model(), *ENGINE])
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{saved}:1: equal: 24 tokens\n1 answer: 1 equal; 24 tokens are equal\n"
    assert page.problems == []


def test_two_settings_are_compared_up_to_their_first_difference(server, page):
    page.open(server.url + "/?settings#compare")
    page.wait_for("document.querySelector('#side-b [data-field=model]')?.options.length === 2")
    fill_side(page, "a", temperature="0", max_tokens="30", seed="1", extra="")
    page.run("document.querySelector('#copy-side').click()")
    fill_side(page, "b", extra='{"bad_words": [" the"], "min_tokens": 30}')
    text = compare(page, "Write two sentences about the sea.")
    assert text.startswith(("The answers differ from token ", "The first tokens differ")), text
    marked = "[...document.querySelectorAll('#side-{} .token')].findIndex((token) => token.matches('.differs'))"
    places = [page.run(marked.format(side)) for side in "ab"]
    assert places[0] == places[1] >= 0
    assert str(places[0] + 1) in text or places[0] == 0
    tokens = "[...document.querySelectorAll('#side-{} .token')].map((token) => token.textContent)"
    a, b = (page.run(tokens.format(side)) for side in "ab")
    assert a[: places[0]] == b[: places[0]] and a[places[0]] != b[places[0]]

    fill_side(page, "b", extra="", max_tokens="5")
    end = "Up to the end of the shorter answer, 5 tokens are identical, bit for bit"
    assert compare(page, "Write two sentences about the sea.") == end

    fill_side(page, "b", extra="{")
    assert compare(page, "Hello.") == ""
    assert "More fields" in page.run("document.querySelector('#side-b .error').textContent")
    assert page.problems == []


def test_an_answer_of_the_chat_has_a_receipt_on_demand(server, page, tmp_path):
    page.open(server.url + "/?receipt#chat")
    page.wait_for("document.querySelector('#model')?.value === 'small'")
    fill(page, max_tokens="6", extra="")
    page.run("document.querySelector('#receipts').click()")
    ask(page, "Hello.")
    answered(page, 1)
    page.save_downloads_to(tmp_path)
    page.run("document.querySelector('.message.assistant .save').click()")
    wait_until(lambda: list(tmp_path.glob("octavo-receipt-*.json")))
    (saved,) = tmp_path.iterdir()
    (answer,) = read_answers(saved)
    assert answer.request["messages"] == [{"role": "user", "content": "Hello."}]
    assert answer.receipt.prompts[0].sequences[0].token_ids
    assert page.problems == []


def test_the_engine_is_seen_at_work(server, page):
    body = {"prompt": [5, 6, 7] * 30, "max_tokens": 300, "ignore_eos": True, "temperature": 0}
    load = threading.Thread(target=server.post, args=("/v1/completions", body))
    page.open(server.url + "/?engine#engine", width=390, height=844, dark=True)
    page.wait_for("document.querySelector('#numbers')?.children.length > 0")
    load.start()
    try:
        page.wait_for("document.querySelectorAll('#requests .bar').length === 1")
        page.wait_for("Number(document.querySelector('#numbers b').textContent) > 0")
        assert page.run("document.documentElement.scrollWidth") <= 390
        page.run("document.querySelector('#tab-compare').click()")
        assert page.run("document.documentElement.scrollWidth") <= 390
        page.run("document.querySelector('#tab-engine').click()")
        pixels = "document.getElementById(id).getContext('2d').getImageData(0, 0, 300, 100).data.buffer"
        drawn = f"(id) => new Set(new Uint32Array({pixels})).size"
        for canvas in ("throughput", "steps", "blocks"):
            assert page.run(f"({drawn})('{canvas}')") > 2, canvas
    finally:
        join(load, timeout_s=180)  # 300 tokens on a busy machine
    page.wait_for("document.querySelector('#requests').textContent.includes('none')")
    assert page.run("document.querySelector('#latency').textContent").count("ms") > 2
    assert page.problems == []
