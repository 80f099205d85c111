"""A tool, and a chat template that shows tools and calls of them."""

TOOLS_TEMPLATE = (
    "{%- if tools -%}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{%- endif -%}"
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' -}}{{- m.content or '' -}}"
    "{%- for tool_call in m.tool_calls or [] -%}"
    "{{- '<tool_call>\\n' + (tool_call.name or '') + '</tool_call>' -}}{%- endfor -%}"
    "{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
