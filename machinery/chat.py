"""Lists of messages → texts and token ids, by the tokenizer's chat template.

A message is `{"role": ..., "content": ...}`. Templates write the special tokens, so tokenizers add
none. A turn begins with a message of the user.
"""

from typing import Any

from jinja2 import TemplateError

from data.tasks import Task
from machinery.cli import InputError

FOR_TEXTS = ("query_prefix", "query_suffix", "start_text", "end_text", "clean_fn", "keep_last_line")


def check_messages(messages: list) -> None:
    """Raise `InputError` unless each message has a role and a content."""
    for message in messages:
        parts = [message.get("role"), message.get("content")] if isinstance(message, dict) else []
        if not parts or not all(isinstance(part, str) for part in parts):
            raise InputError(f"{message!r:.60} is not a message with a role and a content")


def render(messages: list[dict], tokenizer: Any, prompt: bool = False) -> str:
    """Apply the chat template; `prompt` adds the generation prompt. Raises `InputError`."""
    check_messages(messages)
    if not tokenizer.chat_template:
        raise InputError(
            "lists of messages need a tokenizer with a chat template; pass a --base_model that "
            "has one (often named Instruct), or texts"
        )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    except TemplateError as error:
        raise InputError(f"{error} (the chat template, of {messages!r:.60})") from error


def render_answer(prompt: list[dict], answer: list[dict], tokenizer: Any) -> str:
    """The text after that of the prompt, through the end token; "" if there is no answer.

    `answer` may repeat the prompt.
    """
    if not prompt or answer in ([], prompt):
        return ""
    messages = answer if answer[: len(prompt)] == prompt else prompt + answer
    text, dialogue = render(prompt, tokenizer, prompt=True), render(messages, tokenizer)
    if not dialogue.startswith(text):
        raise InputError(f"the chat template changes the prompt {text!r:.60} in {dialogue!r:.60}")
    if not messages[-1]["content"].strip():
        return ""
    return dialogue[len(text) :].rstrip()  # templates end with a newline after the end


def drop_answer(messages: list[dict]) -> list[dict]:
    """The prompt of a conversation: all before the assistant's message, if that is the last one."""
    check_messages(messages)
    return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages


def tokenize_prompt(messages: list[dict], length: int, tokenizer: Any) -> list[int] | None:
    """Tokens of a prompt, at most `length`: the oldest turns are dropped if it is longer.

    A system message at the beginning stays. None if that and the last turn are too long, or if the
    last message is blank.
    """
    if not messages or not messages[-1]["content"].strip():
        return None
    system = 1 if messages[0]["role"] in ("system", "developer") else 0
    turns = [i for i, message in enumerate(messages) if message["role"] == "user"]
    for start in sorted({system, *turns}):
        text = render(messages[:system] + messages[start:], tokenizer, prompt=True)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) <= length:
            return tokens
    return None


def check_chat(task: Task, tokenizer: Any, where: str) -> None:
    """Raise `InputError` if lists of messages cannot be used with this task and tokenizer."""
    for name in FOR_TEXTS:
        if value := getattr(task, name):
            off = f"--no-{name}" if value is True else f"--{name} {getattr(Task, name)!r}"
            raise InputError(f"{where} holds messages; {name}={value!r} is for texts, pass {off}")
    question, answer = ({"role": role, "content": "?"} for role in ("user", "assistant"))
    try:
        end = render_answer([question], [answer], tokenizer).rpartition("?")[2].strip()
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    if task.eos_task and end and end != task.truncate_token:
        raise InputError(
            f"{where} holds messages, and the chat template ends answers with {end!r}, not with "
            f"truncate_token={task.truncate_token!r}; pass --truncate_token {end!r}"
        )
