"""Chats: the prompt that a chat template makes of messages and tools, and the answer to it, are transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from random_texts import write_llama

from models.text.chats import rendered
from models.text.model import TextInputs, TextModel
from models.text.settings import TextSettings

# In the forms of public models: headers (Llama 3), ChatML with tools (Qwen), turns by name (Gemma), brackets (Mistral).
TEMPLATES = {
    "headers": """{{ bos_token }}{% for m in messages %}<|h|>{{ m.role }}<|/h|>

{{ m.content | trim }}<|eot|>{% endfor %}{% if add_generation_prompt %}<|h|>assistant<|/h|>

{% endif %}""",
    "chatml": """{% if tools %}<|im_start|>system
# Tools{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for call in m.tool_calls or [] %}
<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}""",
    "turns": """{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}\
{% endif %}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate') }}{% endif %}<turn>{{ m.role }}
{{ m.content }}</turn>
{% endfor %}{% if add_generation_prompt %}<turn>model
{% endif %}""",
    "brackets": """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]\
{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}""",
}
CHAT = [
    {"role": "user", "content": "Hi, é中"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "And {{ now }}? "},
]
TOOLS = [{"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}]
CALLED = [
    *CHAT[:1],
    {"role": "assistant", "tool_calls": [{"function": {"name": "time", "arguments": {"zone": "utc"}}}]},
    {"role": "tool", "content": "noon"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"), chat_template=TEMPLATES["headers"])


@pytest.fixture(scope="module")
def model(folder) -> TextModel:
    return TextModel.load(str(folder), None, TextSettings(prompt_buckets=(512,)))


@pytest.fixture
def tokenizer(folder) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("template", "messages", "options"),
    [
        ("headers", CHAT, {}),
        ("headers", [{"role": "system", "content": "Be short."}, *CHAT], {}),
        ("chatml", CHAT, {}),
        ("chatml", CALLED, {"tools": TOOLS}),
        ("chatml", CHAT, {"enable_thinking": False}),
        ("turns", CHAT, {}),
        ("brackets", CHAT, {}),
    ],
)
def test_the_tokens_of_a_prompt_and_of_its_answer_are_transformers_own(
    folder, model, tokenizer, template, messages, options, monkeypatch
):
    tokenizer.chat_template = TEMPLATES[template]
    monkeypatch.setattr(model, "_tokenizer", tokenizer)
    variables = {name: value for name, value in options.items() if name != "tools"}
    inputs = TextInputs(messages=messages, tools=options.get("tools"), chat_template_kwargs=variables, max_tokens=8)
    theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options)
    request = model.request(inputs)
    assert request.prompt == tuple(theirs)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    found = plain.generate(torch.tensor([theirs]), do_sample=False, max_new_tokens=8)[0, len(theirs) :].tolist()
    ours = model.run(request)
    assert ours[: len(found)] == found


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_an_error_of_a_template_is_the_answer(tokenizer, role):
    tokenizer.chat_template = TEMPLATES["turns"]
    with pytest.raises(ValueError, match=r"chat template refuses this: (System role not|Conversation roles must)"):
        rendered(tokenizer, [{"role": role, "content": "x"}])


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "conversation", "messages", "tools", "max_length"])
def test_what_is_no_variable_of_a_template_is_refused(tokenizer, name):
    with pytest.raises(ValueError, match=f"chat_template_kwargs has {name}, which is no variable"):
        rendered(tokenizer, CHAT, options={name: "x"})


@pytest.mark.parametrize("message", ["x", None, 3, [], {"role": 1}, {"role": "", "content": "x"}])
def test_a_message_without_a_role_is_named_by_its_place(tokenizer, message):
    with pytest.raises(ValueError, match=r"messages\[3\] has no role"):
        rendered(tokenizer, [*CHAT, message])


@pytest.mark.parametrize("content", [None, 3, {"text": "x"}])
def test_a_message_without_a_text_is_named_by_its_place(tokenizer, content):
    with pytest.raises(ValueError, match=r"messages\[0\] has no content"):
        rendered(tokenizer, [{"role": "user", "content": content}])


@pytest.mark.parametrize("part", ["x", None, {"type": "image"}, {"text": "x"}, {"type": "text"}])
def test_a_part_that_has_no_text_is_refused_by_its_type(tokenizer, part):
    with pytest.raises(ValueError, match=r"messages\[0\] has a part of type \w+; this model reads"):
        rendered(tokenizer, [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}])


def test_a_model_without_a_template_takes_no_chat(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template: put all that it is to know into the prompt"):
        rendered(tokenizer, CHAT)
