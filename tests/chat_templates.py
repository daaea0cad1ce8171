"""Chat templates in the manner of the supported families: what shapes their prompts, without their length."""

from __future__ import annotations

# A system block of its own where none is given; the same markers for every role.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are kind.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The same with tools in the system block.
QWEN25 = (
    "{%- if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}Qwen."
    "{% endif %}\n\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{%- else %}{{ '<|im_start|>system\nQwen.<|im_end|>\n' }}{% endif %}"
    "{%- for message in messages %}{% if not (message.role == 'system' and loop.first) %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Reasoning is shown in the last answer, empty or not, and taken out of earlier ones.
QWEN3 = (
    "{%- set last = messages | length - 1 %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{%- set thought = m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content else '' %}"
    "{%- if loop.index0 == last %}{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') if '</think>' in m.content else m.content }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# BOS, a system block that is always there and prints the date, texts without white space around them.
LLAMA31 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + strftime_now('%d %b %Y') + '\n\n' + system }}"
    "{{ '<|eot_id|>' }}{% for m in rest %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# BOS, no header for answers, the system text in front of the first question.
MISTRAL1 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}{{ '[INST] ' + (system if loop.first else '') + m.content }}"
    "{{ ' [/INST]' }}{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}{{ raise_exception('user and assistant only') }}{% endif %}{% endfor %}"
)
# The same, but in front of the question that is being asked: trained with an answer behind it, it has none.
MISTRAL3 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}{{ '[INST] ' + (system if loop.last else '') + m.content }}"
    "{{ '[/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
FAMILIES = {
    "smollm2": SMOLLM2, "qwen2.5": QWEN25, "qwen3": QWEN3, "llama3.1": LLAMA31, "mistral-v1": MISTRAL1,
    "mistral-v3": MISTRAL3,
}  # fmt: skip
_MARKS = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]")
TOKENS = ("<s>", "</s>", *_MARKS)
