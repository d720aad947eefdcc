"""Passages that are put into the texts: where the answers to questions about them stand is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Fact:
    """A passage of two or three sentences, as long as most of what is worth remembering, and two questions
    that it answers."""

    passage: str
    plain: str  # shares words with the passage
    reworded: str  # shares no content word with it


FACTS: Final = (
    Fact(
        "The greenhouse behind the school needed new paint. Nobody else had time, so Martha did it in "
        "April. She chose yellow, because that was the only tin left in the shed.",
        "Which colour did Martha paint the greenhouse behind the school?",
        "Why did a woman pick a bright shade for the glass building where plants grow?",
    ),
    Fact(
        "Captain Osei looks after the lighthouse on the northern cape. He goes fishing on most "
        "afternoons. For visitors he leaves a spare key under the blue flowerpot.",
        "Where does Captain Osei leave the spare key of the lighthouse?",
        "How could guests get into the tower by the sea when nobody is in?",
    ),
    Fact(
        "There is only one night train to Varna now. It waits on platform nine until the mail has come."
        " In summer it leaves at a quarter past eleven.",
        "When does the night train to Varna leave in summer?",
        "What time should travellers who want to sleep on the way be at the station?",
    ),
    Fact(
        "Our baker made the wedding cake with almonds and honey. The guests had asked for walnuts. "
        "Those make him ill, even when he only touches the shells.",
        "Why did the baker make the wedding cake with almonds and not with walnuts?",
        "What is the person who prepared the dessert allergic to?",
    ),
    Fact(
        "The old bridge at Hedley has been closed to lorries since March. They must take the road "
        "through the woods. The flood had cracked its second pillar.",
        "Why has the old bridge at Hedley been closed to lorries?",
        "What damage keeps heavy traffic from crossing the river?",
    ),
    Fact(
        "Doctor Lindqvist wanted a telescope with a wide mirror. Her savings were not nearly enough. In"
        " the end she sold the violin that her mother had played.",
        "What did Doctor Lindqvist sell to pay for the telescope?",
        "Which instrument did the physician give up to be able to watch the stars?",
    ),
    Fact(
        "When the harvest is late, Farmer Duarte has no money for his pickers. They do not complain "
        "about it. He pays them in olives and they sell these at the market.",
        "How does Farmer Duarte pay his pickers when the harvest is late?",
        "What do workers in the field get instead of cash in a slow season?",
    ),
    Fact(
        "The choir has practised in the cellar since November. It is dark there and smells of apples. "
        "But the chapel roof leaks whenever the snow melts.",
        "Why has the choir practised in the cellar since November?",
        "What is wrong with the place of worship that the singers have moved out of?",
    ),
    Fact(
        "Inspector Haddad searched the thief's kitchen twice for the necklace. The second time she felt"
        " hungry. It was in a hollow loaf of bread.",
        "Where did Inspector Haddad find the necklace in the thief's kitchen?",
        "In what food had a burglar hidden the jewellery from the police?",
    ),
    Fact(
        "Young Pavel won the chess tournament in Brno. Everybody thought that he had made a mistake. On"
        " move twelve he had given up his queen for a pawn.",
        "How did young Pavel win the chess tournament in Brno?",
        "Which piece did the boy sacrifice to beat all others at the board game?",
    ),
    Fact(
        "The clock in the town hall runs backwards these days. People have got used to reading it in a "
        "mirror. An apprentice put the wheels in the wrong way round.",
        "Why does the clock in the town hall run backwards?",
        "Whose fault is it that the time is shown in reverse?",
    ),
    Fact(
        "Aunt Rosalind does not trust banks with her savings. She told only her nephew where they are. "
        "They lie in a tin of peppermint tea on the top shelf.",
        "Where does Aunt Rosalind keep her savings?",
        "In what container would a robber have to look for the old lady's money?",
    ),
    Fact(
        "The expedition to the Sorrel glacier turned back after nine days. There was still food for a "
        "month. But the last of the sledge dogs had fallen ill.",
        "Why did the expedition to the Sorrel glacier turn back?",
        "What happened to an animal that made the explorers stop?",
    ),
    Fact(
        "Professor Thibault lectures barefoot on Mondays. The students take it for a joke. It is how he"
        " remembers his grandfather, who was a fisherman.",
        "Why does Professor Thibault lecture barefoot on Mondays?",
        "Which relative does the teacher honour by taking off his shoes at work?",
    ),
    Fact(
        "The library has more than umbrellas enough at its door. Not everyone may borrow one when it "
        "rains. They are for readers who have never returned a book late.",
        "To whom does the library lend its umbrellas?",
        "What must people do with novels to be given something against bad weather?",
    ),
    Fact(
        "The postman of Ulverton had to change his round this spring. The lock of the canal is broken, "
        "and the lane is under water. He now delivers by canoe.",
        "How does the postman of Ulverton deliver while the lock of the canal is broken?",
        "By what kind of boat do letters reach the village?",
    ),
)

LOCKERS: Final = (
    ("copper", "7316"), ("silver", "7361"), ("marble", "3716"), ("walnut", "3761"),
    ("velvet", "6137"), ("amber", "6173"), ("cedar", "1637"), ("ivory", "1673"),
)  # fmt: skip
"""Statements that differ in one word: which of them is meant must not be lost among the others."""


def locker(name: str, code: str) -> Fact:
    """One of the statements that look alike."""
    return Fact(
        f"The {name} locker on the ground floor opens with the code {code}.",
        f"What is the code of the {name} locker?",
        f"Which number opens the {name} one?",
    )
