"""A conversation in memory: what was said so far, and the commands that change it."""

from __future__ import annotations

from dataclasses import dataclass, field

HELP = """\
/system TEXT   set what the model is told before everything else; without TEXT: nothing
/reset         forget the conversation
/help          this list
Ctrl-C stops an answer; Ctrl-D or /quit leaves"""


@dataclass
class Conversation:
    """The turns that are sent with the next question, oldest first, after the system's."""

    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)

    def ask(self, question: str) -> list[dict[str, str]]:
        """The messages to send for a question; nothing is kept before `keep`."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns, {"role": "user", "content": question}]

    def keep(self, question: str, answer: str) -> None:
        """Remembers a question and what was answered, even when the answer was stopped in the middle."""
        self.turns.append({"role": "user", "content": question})
        self.turns.append({"role": "assistant", "content": answer})

    def command(self, line: str) -> str:
        """Carries out a line that begins with "/"; returns what to show."""
        name, _, rest = line.partition(" ")
        match name:
            case "/system":
                self.system = rest.strip()
                return f"system: {self.system or 'none'}"
            case "/reset":
                self.turns.clear()
                return "forgotten"
            case "/help":
                return HELP
            case _:
                return f"there is no {name}; /help lists what there is"
