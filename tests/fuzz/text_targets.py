"""Targets: the tokenizer of a model and its chat template. They come from strangers."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING

from quire_common.errors import ConfigError, QuireError
from quire_tokenizer.chat.chat_renderer import ChatRenderer, ChatRequest
from quire_tokenizer.chat.render_pool import RenderLimits, RenderPool
from quire_tokenizer.model_files import read_model_files
from quire_tokenizer.vocabulary import Vocabulary
from quire_tokenizer.work_pool import WorkPool
from tests.fuzz.changes.byte_changes import changed_bytes
from tests.fuzz.changes.json_changes import changed_json, is_json
from tests.fuzz.target import FILES_MARK, Outcome, Target, check_error
from tests.unit.tokenizer import folders

if TYPE_CHECKING:
    from pathlib import Path


class TokenizerTarget(Target):
    """tokenizer.json and tokenizer_config.json: loading, then text to tokens and back."""

    covers = (
        "tokenizer/quire_tokenizer/model_folder.py",
        "tokenizer/quire_tokenizer/vocabulary.py",
        "tokenizer/quire_tokenizer/guarded_tokenizer.py",
        "tokenizer/quire_tokenizer/detokenize/token_pieces.py",
    )

    def seeds(self) -> list[bytes]:
        made = []
        for kind in folders.KINDS:
            folder = folders.write_folder(self.folder / kind, kind)
            made.append(
                _small(folder / "tokenizer.json") + FILES_MARK + (folder / "tokenizer_config.json").read_bytes()
            )
        return made

    def mutate(self, data: bytes, choose: random.Random) -> bytes:
        tokenizer, _, config = data.partition(FILES_MARK)
        if choose.random() < 0.8:
            tokenizer = changed_json(tokenizer, choose, _PARTS)
        else:
            config = changed_json(config, choose, ("bos_token", "eos_token", "chat_template", "name", "template"))
        return tokenizer + FILES_MARK + config

    def run(self, data: bytes) -> Outcome:
        tokenizer, _, config = data.partition(FILES_MARK)
        (self.folder / "tokenizer.json").write_bytes(tokenizer)
        (self.folder / "tokenizer_config.json").write_bytes(config)
        try:
            vocabulary = Vocabulary(read_model_files(str(self.folder)))
        except ConfigError as error:
            check_error(error)
            return Outcome.REFUSED if is_json(tokenizer) and is_json(config) else Outcome.UNREADABLE
        self._use(vocabulary)
        return Outcome.ACCEPTED

    @staticmethod
    def _use(vocabulary: Vocabulary) -> None:
        try:
            ids = vocabulary.guarded.encode_batch(["hello <s> wörld 😀"], add_special_tokens=True)[0].tolist()
        except QuireError as error:
            check_error(error)
            return
        decoder = vocabulary.decoder(skip_special_tokens=True, spaces_between_special_tokens=True)
        for token in (*ids, 0, vocabulary.size - 1):
            decoder.feed(token)
            vocabulary.token_bytes(token)


_TEXT_OF_PARTS = """
    type BPE Unigram WordPiece WordLevel ByteLevel Metaspace Sequence Split pattern Regex String behavior Isolated
    Removed normalizers pretokenizers decoders Replace Prepend Strip TemplateProcessing vocab merges unk_token
    <unk> byte_fallback special content NFC (a+)+$ [ (?= truncation padding max_length added_tokens Fuse
    """
_PARTS = (
    *_TEXT_OF_PARTS.split(),
    "\\p{L}",
)


def _small(path: Path) -> bytes:
    """A tokenizer with few enough tokens that changes reach the rest of it too."""
    shape = json.loads(path.read_text())
    vocab = shape["model"]["vocab"]
    if isinstance(vocab, dict):
        shape["model"]["vocab"] = dict(list(vocab.items())[:300])
        known = shape["model"]["vocab"]
        if "merges" in shape["model"]:
            merges = [m if isinstance(m, list) else m.split(" ") for m in shape["model"]["merges"]]
            shape["model"]["merges"] = [m for m in merges if {m[0], m[1], m[0] + m[1]} <= known.keys()][:30]
    else:
        shape["model"]["vocab"] = vocab[:60]
    return json.dumps(shape).encode()


class TemplateTarget(Target):
    """A chat template that a conversation is rendered by, in processes of its own, as for a request."""

    covers = ("tokenizer/quire_tokenizer/chat",)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        vocabulary = Vocabulary(read_model_files(str(folders.write_folder(folder / "tiny"))))
        self._pool = RenderPool(1, 4, RenderLimits(0.5, 512 << 20, 1 << 16))
        self._loop = asyncio.new_event_loop()
        work = WorkPool(1, 4)
        self._renderer = ChatRenderer(vocabulary, self._pool, work, max_bytes=1 << 20, allow_request_template=True)
        self.closing.callback(self._loop.close)
        self.closing.callback(lambda: self._loop.run_until_complete(self._pool.close()))

    def seeds(self) -> list[bytes]:
        chat = json.dumps([{"role": "user", "content": "Hi <|im_end|>"}, {"role": "assistant", "content": "Yes."}])
        return [template.encode() + FILES_MARK + chat.encode() for template in _TEMPLATES]

    def mutate(self, data: bytes, choose: random.Random) -> bytes:
        template, _, chat = data.partition(FILES_MARK)
        if choose.random() < 0.3:
            return (
                template
                + FILES_MARK
                + changed_json(chat, choose, ("role", "content", "system", "tool_calls", "text", "type"))
            )
        text = template.decode("utf-8", "replace")
        if choose.random() < 0.2:
            return changed_bytes(template, choose) + FILES_MARK + chat
        # A piece more, or an expression in place of another: mostly still a template.
        at = choose.choice(
            [index for index in range(len(text) + 1) if text[:index].count("{") == text[:index].count("}")]
        )
        piece = choose.choice(_PIECES)
        return (text[:at] + piece + text[at:]).encode() + FILES_MARK + chat

    def run(self, data: bytes) -> Outcome:
        template, _, chat = data.partition(FILES_MARK)
        request = ChatRequest(chat.decode("utf-8", "replace"), template=template.decode("utf-8", "replace") or " ")
        try:
            self._loop.run_until_complete(self._renderer.render(request))
        except QuireError as error:
            check_error(error)
            return Outcome.UNREADABLE if "is not valid: " in error.message else Outcome.REFUSED
        return Outcome.ACCEPTED


_TEMPLATES = (
    folders.TEMPLATE,
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role }}{{ m.content | tojson(indent=2) }}{% endfor %}{{ eos_token }}",
    "{% macro turn(m) %}[{{ m.content | upper }}]{% endmacro %}{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ turn(m) }}{% if ns.n > 3 %}{% break %}{% endif %}{% endfor %}",
    "{% generation %}{{ strftime_now('%Y') }}{% endgeneration %}{{ raise_exception('no') if not messages }}",
)
_PIECES = (
    "{{ ''.__class__.__mro__ }}",
    "{{ messages | map('upper') | list }}",
    "{{ 'x' * 100000000 }}",
    "{{ range(10 ** 9) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{{ messages | tojson }}",
    "{{ none + 1 }}",
    "{{ 1 // 0 }}",
    "{{ undefined_name.x }}",
    "{% set messages = [] %}",
    "{{ messages.append(1) }}",
    "{{ 9 ** 9 ** 9 }}",
    "{% include 'x' %}",
    "{% import 'os' as os %}",
    "{{ '\ud7ff\ue000' }}",
    "{{ '%s' | format(messages) }}",
    "{{ lipsum(n=999) }}",
    "{% raw %}{{",
    "{{ dict(a=1).items() | list }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ bos_token }}",
    "{{ strftime_now('%Q%') }}",
    "{%- if add_generation_prompt -%}A{%- else -%}B{%- endif -%}",
    "{{ messages[-1]['content'][5:] }}",
    "{# #}",
    "{% endfor %}",
    "{{ namespace(a=1).a }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | first }}",
    "{{ raise_exception(messages) }}",
)
