"""The merges that a SentencePiece BPE vocabulary stands for. Pure.

Such a vocabulary has scores and no list of merges: of all neighbours whose joined text is a piece, those with
the best score are joined first, the leftmost of equals. As a list: every way to cut every piece into two pieces,
by the score of the whole.
"""

from collections.abc import Mapping


def merges_by_score(scores: Mapping[str, float]) -> tuple[tuple[str, str], ...]:
    """Pairs, best first. scores: of each piece that text may become, in the order of their ids.

    Several cuts of one piece have one score, and which comes first matters only where both could be made of the same
    characters, as in a run of one character. Runs are joined from the left, so the longer left part goes first.
    """
    ranked = sorted(scores, key=scores.__getitem__, reverse=True)
    return tuple(
        (piece[:cut], piece[cut:])
        for piece in ranked
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in scores and piece[cut:] in scores
    )
