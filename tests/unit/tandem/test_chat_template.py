from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandem.errors import CheckpointError, ConfigError, InputError
from tandem.testing.models import FakeClock, write_tiny_llama
from tandem.text.chat_template import ChatTemplate
from tandem.text.jinja_limits import TemplateLimits

HELLO = [{"role": "user", "content": "Hello"}]
SMALL = TemplateLimits(template_chars=10_000, text_chars=1_000, iterations=1_000)


def render(source: str, limits: TemplateLimits = SMALL) -> str:
    return ChatTemplate(source, limits=limits, clock=FakeClock()).render(HELLO)


def test_a_checkpoints_template_spells_the_prompt(tmp_path: Path) -> None:
    template = ChatTemplate.load(write_tiny_llama(tmp_path))
    assert template is not None

    assert template.render(HELLO) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(HELLO, add_generation_prompt=False) == "<|im_start|>user\nHello<|im_end|>\n"


def test_the_default_of_several_named_templates_is_used_and_tokens_have_names(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "{{ bos_token }}{{ eos_token }}"}]
    config = {"chat_template": named, "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(HELLO) == "<s></s>"


def test_a_jinja_file_goes_before_the_tokenizer_config(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from the file")
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(HELLO) == "from the file"


def test_a_checkpoint_without_a_template_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None


@pytest.mark.parametrize("config", ['{"chat_template": 7}', '{"chat_template": "{% for %}"}', "not JSON"])
def test_an_unusable_template_is_refused_when_loaded_and_names_the_file(config: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[0]['content'] | upper | trim }}", "HELLO"),
        ("{{ 'a' ~ 1 ~ none ~ [1, 'b'] }}", "a1None[1, 'b']"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Hello"}]'),
        ("{{ {'b': 'ü', 'a': 1} | tojson(ensure_ascii=True, sort_keys=True) }}", '{"a": 1, "b": "\\u00fc"}'),
        ("{{ {'a': [1, 2]} | tojson(separators=(',', ':')) }}", '{"a":[1,2]}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ messages | map(attribute='role') | join(', ') }}", "user"),
        ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
        ("{{ 'aXb'.replace('X', '-') }}{{ ','.join(['a', 'b']) }}", "a-ba,b"),
        ("{{ 'a,b'.split(',')[-1] }}{{ messages | length }}{{ '%s!' % 'x' }}", "b1x!"),
        ("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{{ loop.index }}{% endfor %}", "0112"),
        ("{% for i in [] %}x{% else %}none{% endfor %}", "none"),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') }}{{ m('b') }}", "<a><b>"),
        ("{% if tools is not none %}tools{% endif %}{{ '<&>' }}", "<&>"),
        ("{% for m in messages if m.role == 'user' %}\n  {{- m.content }}\n{% endfor %}", "Hello\n"),
    ],
)
def test_what_chat_templates_use_works(source: str, text: str) -> None:
    assert render(source) == text


def test_what_a_template_raises_is_the_callers_error() -> None:
    with pytest.raises(InputError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__()[0] }}",
        "{{ messages[0]['content'].__class__ }}{{ (1).__class__.__mro__[0]() }}",
        "{{ self.__init__.__globals__['os'].system('true') }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{{ raise_exception.__globals__['SecurityError'] }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ '{x.__class__}'.format_map({'x': 1}) }}",
        "{{ messages | attr('__class__') }}",
        "{{ messages | map(attribute='__class__') | list }}{{ (messages | map('attr', 'x') | list) }}",
        "{{ messages.append({'role': 'x'}) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{{ lipsum() }}",
        "{{ get_flashed_messages() }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    with pytest.raises((InputError, ConfigError)):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(2000) %}{% endfor %}",
        "{% for i in range(100) %}{% for j in range(100) %}{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ range(10000000) | list | length }}",
        "{{ 'x' * 100000 }}",
        "{{ [1] * 100000 }}",
        "{{ 10 ** 100000000 }}",
        "{% set ns = namespace(n=9) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{% set ns = namespace(s='xx') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='xx') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(40) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(40) %}{% set ns.s = [ns.s] * 2 %}{% endfor %}{{ns.s|tojson}}",
        "{{ 'aaaaaaaaaa'.replace('a', 'b' * 500) }}",
        "{{ 'aaaaaaaaaa' | replace('a', 'b' * 500) }}",
        "{{ ('b' * 500).join(['a', 'a', 'a', 'a']) }}",
        "{{ ['a', 'a', 'a', 'a'] | join('b' * 500) }}",
        "{{ 'a' | indent(100000, true) }}",
        "{{ 'a'.center(100000) }}",
        "{{ '%100000d' % 1 }}",
        "{{ '%*d' % (100000, 1) }}",
        "{% set x %}{% for i in range(900) %}abcdef{% endfor %}{% endset %}{{ x | length }}",
        "{% for i in range(900) %}abcdef{% endfor %}",
    ],
)
@pytest.mark.acceptance(40, here="templates; up to 5 s")
def test_a_template_cannot_take_more_than_its_limits(source: str) -> None:
    with pytest.raises((InputError, ConfigError)):
        render(source)


def test_a_template_stops_at_its_deadline() -> None:
    class Running:
        """A clock on which every look costs a second."""

        def __init__(self) -> None:
            self.looks = 0

        def now_s(self) -> float:
            self.looks += 1
            return float(self.looks)

    endless = "{% for i in range(1000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(endless, limits=TemplateLimits(iterations=10**9), clock=Running())
    with pytest.raises(InputError, match="seconds"):
        template.render(HELLO)


def test_a_template_that_is_too_long_is_refused() -> None:
    with pytest.raises(CheckpointError, match="at most 10000 characters, got 10001"):
        render("x" * 10_001)


def test_messages_are_data_not_template() -> None:
    template = ChatTemplate("{{ messages[0].content }}", clock=FakeClock())
    assert template.render([{"role": "user", "content": "{{ 1 + 1 }}"}]) == "{{ 1 + 1 }}"


def test_threads_share_one_template() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", limits=SMALL, clock=FakeClock())
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda n: template.render([{"role": "user", "content": str(n)}]), range(200)))
    assert texts == [str(n) for n in range(200)]
