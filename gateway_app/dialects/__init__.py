"""One class a provider API: parse a request, render a response, stream it, shape an error, count. ``DIALECTS`` by name.

May import `schemas` only.
"""

from __future__ import annotations

from gateway_app.dialects.anthropic_messages import AnthropicMessages
from gateway_app.dialects.chat_completions import OpenAIChat
from gateway_app.dialects.dialect import Dialect
from gateway_app.dialects.google_generate import GoogleGenerate
from gateway_app.dialects.openai_responses import OpenAIResponses

DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect for dialect in (OpenAIChat(), OpenAIResponses(), AnthropicMessages(), GoogleGenerate())
}
GOOGLE_ARRAY: Dialect = GoogleGenerate(sse=False)
"""Google's, where a stream is one JSON array."""
