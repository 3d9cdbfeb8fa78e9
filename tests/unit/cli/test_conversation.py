from __future__ import annotations

from cli.conversation import Conversation


def test_a_question_is_sent_after_everything_that_was_said() -> None:
    conversation = Conversation(system="be brief")
    conversation.keep("a", "b")
    roles = [(turn["role"], turn["content"]) for turn in conversation.ask("c")]
    assert roles == [("system", "be brief"), ("user", "a"), ("assistant", "b"), ("user", "c")]


def test_asking_alone_remembers_nothing() -> None:
    conversation = Conversation()
    conversation.ask("a")
    assert conversation.turns == []


def test_reset_forgets_the_turns_and_keeps_the_system() -> None:
    conversation = Conversation(system="s")
    conversation.keep("a", "b")
    assert conversation.command("/reset") == "forgotten"
    assert conversation.ask("c") == [{"role": "system", "content": "s"}, {"role": "user", "content": "c"}]


def test_system_without_a_text_is_none() -> None:
    conversation = Conversation()
    assert "be kind" in conversation.command("/system be kind")
    assert conversation.system == "be kind"
    conversation.command("/system")
    assert conversation.ask("a") == [{"role": "user", "content": "a"}]


def test_an_unknown_command_points_to_help() -> None:
    assert "/help" in Conversation().command("/foo")
    assert "/reset" in Conversation().command("/help")
