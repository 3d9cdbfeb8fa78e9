"""The first answer after `tailrace up --demo`, and how to get the next one from elsewhere."""

from __future__ import annotations

from cli.terminal import Terminal
from tailrace.client import Client, Delta

QUESTION = "What can a river be used for? Answer in one short paragraph."


async def show_answer(terminal: Terminal, address: str) -> None:
    """Streams one answer onto the terminal. Raises a ClientError."""
    terminal.say(f"\n› {QUESTION}")
    async with Client(address) as client:
        stream = client.chat([{"role": "user", "content": QUESTION}], max_tokens=128, temperature=0.0)
        with terminal.held():
            async for event in stream:
                if isinstance(event, Delta):
                    terminal.write(event.text)
            terminal.write("\n")


def how_to_call(*, http_port: int, grpc_port: int, model: str) -> str:
    """The same question for curl, the openai client, buf and the Python client."""
    return f"""
It goes on serving. Ask it yourself:

  curl -N http://127.0.0.1:{http_port}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "Hello!"}}]}}'

  python -c 'import openai
  client = openai.OpenAI(base_url="http://127.0.0.1:{http_port}/v1", api_key="none")
  messages = [{{"role": "user", "content": "Hello!"}}]
  for chunk in client.chat.completions.create(model="{model}", messages=messages, stream=True):
      print(chunk.choices[0].delta.content or "", end="", flush=True)'

  buf curl --protocol grpc --http2-prior-knowledge -d '{{"messages": [{{"role": "user", "content": "Hello!"}}]}}' \\
    http://127.0.0.1:{grpc_port}/tailrace.v1.GenerationService/Chat

  python -c 'from tailrace.client.sync import Client
  for event in Client("127.0.0.1:{grpc_port}").chat([{{"role": "user", "content": "Hello!"}}]):
      print(getattr(event, "text", ""), end="", flush=True)'

  tailrace chat{"" if grpc_port == 7000 else f" --server 127.0.0.1:{grpc_port}"}

Ctrl-C stops everything."""
