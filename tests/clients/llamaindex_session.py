"""What LlamaIndex's OpenAI-like client hears of a server; run by its own interpreter, with a URL and a model."""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

url, model = sys.argv[1:]
llm = OpenAILike(model=model, api_base=url, api_key="unused", is_chat_model=True, temperature=0, max_tokens=16)
ask = [ChatMessage(role="user", content="What is the capital of France?")]
plain = OpenAILike(model=model, api_base=url, api_key="unused", is_chat_model=False, temperature=0, max_tokens=8)
said = {
    "chat": llm.chat(ask).message.content,
    "streamed": "".join(part.delta or "" for part in llm.stream_chat(ask)),
    "completed": plain.complete("Once upon a time").text,
}
sys.stdout.write(json.dumps(said) + "\n")
