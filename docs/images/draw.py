"""Draws the pictures of the documentation: `python docs/images/draw.py` writes the SVG files beside this one.

Every picture has a light background of its own, so that it can be read on a light and on a dark page.
"""

from __future__ import annotations

import html
from pathlib import Path

FOLDER = Path(__file__).parent
INK, GREY, LINE = "#1f2328", "#57606a", "#8c959f"
BLUE, GREEN, YELLOW, RED, PLAIN = (
    ("#ddf4ff", "#0969da"),
    ("#dafbe1", "#1a7f37"),
    ("#fff8c5", "#9a6700"),
    ("#ffebe9", "#cf222e"),
    ("#f6f8fa", "#8c959f"),
)


class Picture:
    """An SVG file that grows by boxes, arrows and text."""

    def __init__(self, name: str, title: str, width: int, height: int) -> None:
        self.name = name
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}"'
            ' font-family="system-ui, sans-serif" font-size="13" role="img">',
            f"<title>{html.escape(title)}</title>",
            '<defs><marker id="a" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse">'
            f'<path d="M0 0 L10 5 L0 10 z" fill="{GREY}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        ]

    def box(
        self, x: float, y: float, width: float, height: float, text: str, colour: tuple[str, str] = BLUE
    ) -> None:
        """A box; the first line of its text is bold when there are several."""
        fill, stroke = colour
        self.lines.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="7" fill="{fill}" '
            f'stroke="{stroke}" stroke-width="1.3"/>'
        )
        lines = text.split("\n")
        first = y + height / 2 - (len(lines) - 1) * 8.5 + 4.5
        for number, line in enumerate(lines):
            bold = len(lines) > 1 and number == 0
            self.text(x + width / 2, first + 17 * number, line, anchor="middle", bold=bold)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        anchor: str = "start",
        bold: bool = False,
        size: int = 13,
        colour: str = INK,
    ) -> None:
        """One line of text; a line break begins another one below. Grey text has a white edge: it may stand
        on a line.
        """
        weight = ' font-weight="600"' if bold else ""
        weight += ' paint-order="stroke" stroke="#ffffff" stroke-width="5"' if colour == GREY else ""
        for number, line in enumerate(text.split("\n")):
            place = f'x="{x:g}" y="{y + (size + 4) * number:g}" text-anchor="{anchor}" font-size="{size}"'
            self.lines.append(f'<text {place} fill="{colour}"{weight}>{html.escape(line)}</text>')

    def arrow(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        text: str = "",
        *,
        both: bool = False,
        dashed: bool = False,
        plain: bool = False,
    ) -> None:
        """An arrow, or a plain line; its text stands above its middle."""
        marks = "" if plain else ' marker-end="url(#a)"' + (' marker-start="url(#a)"' if both else "")
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.lines.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{GREY}" '
            f'stroke-width="1.3"{dash}{marks}/>'
        )
        if text:
            self.text((x1 + x2) / 2, (y1 + y2) / 2 - 6, text, anchor="middle", size=12, colour=GREY)

    def save(self) -> None:
        """Write the file."""
        (FOLDER / f"{self.name}.svg").write_text("\n".join([*self.lines, "</svg>", ""]), encoding="utf-8")


def sequence(
    name: str, title: str, actors: list[str], steps: list[tuple[int, int, str]], width: int = 860
) -> None:
    """Draw messages between actors, from top to bottom. A step from an actor to itself is an action of it."""
    height = 96 + 40 * len(steps)
    picture = Picture(name, title, width, height)
    places = [width / len(actors) * (number + 0.5) for number in range(len(actors))]
    for place, actor in zip(places, actors, strict=True):
        picture.box(place - 78, 14, 156, 44, actor)
        picture.arrow(place, 58, place, height - 14, plain=True, dashed=True)
    for number, (sender, receiver, text) in enumerate(steps):
        y = 96 + 40 * number
        if sender == receiver:
            wide = 7.2 * len(text) + 20
            left = min(max(places[sender] - wide / 2, 8), width - wide - 8)
            picture.box(left, y - 16, wide, 28, text, PLAIN)
        else:
            picture.arrow(places[sender], y, places[receiver], y, text)
    picture.save()


def overview() -> None:
    picture = Picture(
        "overview",
        "Peers train on their own data and average; a newcomer needs the address of one of them",
        860,
        320,
    )
    for ends in (
        (300, 92, 412, 60),
        (300, 114, 412, 226),
        (586, 60, 640, 126),
        (586, 230, 640, 162),
        (499, 86, 499, 204),
    ):
        picture.arrow(*ends, both=True)
    picture.arrow(300, 102, 640, 144, both=True)
    picture.box(126, 76, 174, 52, "volunteer\nown data, CPU or GPU")
    picture.box(412, 34, 174, 52, "volunteer\nowns the run, may leave")
    picture.box(412, 204, 174, 52, "volunteer\nat night, within limits")
    picture.box(640, 118, 174, 52, "volunteer\nin another country")
    picture.box(126, 204, 174, 52, "newcomer\nswarm join INVITE", GREEN)
    picture.arrow(213, 204, 213, 130, dashed=True)
    picture.text(222, 172, "address of any peer", size=12, colour=GREY)
    picture.text(
        126,
        286,
        "Every line is a mutual TLS connection. Peers find one another in a distributed hash table,\n"
        "train on their own samples, and average gradients or parameters in rounds.",
        colour=GREY,
    )
    picture.save()


def discovery() -> None:
    picture = Picture(
        "discovery", "Peers on the ring of keys; a record lies at the five peers nearest to its key", 860, 330
    )
    picture.arrow(40, 150, 820, 150, plain=True)
    picture.text(40, 176, "0", size=12, colour=GREY)
    picture.text(820, 176, "2²⁵⁶", size=12, colour=GREY, anchor="end")
    near = {330, 384, 436, 492, 548}
    for x in (84, 150, 226, *sorted(near), 640, 706, 776):
        fill, stroke = GREEN if x in near else BLUE
        picture.lines.append(
            f'<circle cx="{x}" cy="150" r="10" fill="{fill}" stroke="{stroke}" stroke-width="1.5"/>'
        )
    picture.arrow(446, 96, 446, 134)
    picture.box(316, 46, 260, 48, "record\nkey = SHA-256 of namespace/name", YELLOW)
    picture.arrow(330, 186, 548, 186, plain=True)
    picture.text(
        439,
        206,
        "5 replicas: the peers whose PeerID hashes nearest to the key",
        anchor="middle",
        size=12,
        colour=GREY,
    )
    picture.box(24, 236, 160, 48, "a new peer\nknows one address", GREEN)
    picture.arrow(186, 260, 326, 260, "Find: my own place")
    picture.box(328, 236, 180, 48, "its entry\nnames nearer peers")
    picture.arrow(510, 260, 638, 260, "Find, Ping")
    picture.box(640, 236, 196, 48, "its neighbours\nhand over their records")
    picture.save()


def phases() -> None:
    picture = Picture(
        "round",
        "A round of three members: each reduces one shard of the vector and returns its average",
        860,
        372,
    )
    names, colours = ("peer A", "peer B", "peer C"), (BLUE, GREEN, YELLOW)
    for number, name in enumerate(names):
        y = 56 + 96 * number
        picture.text(20, y + 36, name, bold=True)
        for shard, colour in enumerate(colours):
            picture.box(84 + 62 * shard, y + 14, 58, 36, f"shard {shard + 1}", colour)
        picture.box(
            390, y + 6, 170, 52, f"{name} reduces\nshard {number + 1} of all members", colours[number]
        )
        for shard in range(3):
            picture.box(660 + 62 * shard, y + 14, 58, 36, f"avg {shard + 1}", colours[shard])
    for sender in range(3):
        for reducer in range(3):
            if sender != reducer:
                picture.arrow(274, 88 + 96 * sender, 388, 88 + 96 * reducer)
                picture.arrow(562, 88 + 96 * reducer, 656, 88 + 96 * sender)
    picture.text(176, 34, "own gradients × weight", anchor="middle", colour=GREY)
    picture.text(475, 34, "sum in group order, encode once", anchor="middle", colour=GREY)
    picture.text(752, 34, "the same bytes for everybody", anchor="middle", colour=GREY)
    picture.text(
        20,
        356,
        "Then each member votes with the digest of all averages; the round commits when the votes agree.",
        colour=GREY,
    )
    picture.save()


def modes() -> None:
    picture = Picture("modes", "When peers compute and when they average, in each mode", 860, 330)
    picture.text(176, 30, "time →", colour=GREY, size=12)

    def row(y: int, name: str, note: str, parts: list[tuple[int, int, str, tuple[str, str]]]) -> None:
        picture.text(20, y + 22, name, bold=True)
        picture.text(20, y + 40, note, size=11, colour=GREY)
        for start, length, text, colour in parts:
            picture.box(176 + start, y + 8, length, 30, text, colour)

    work, talk = BLUE, YELLOW
    row(
        44,
        "gradients",
        "a round every step",
        [
            part
            for one in range(4)
            for part in ((one * 160, 94, "one batch", work), (one * 160 + 96, 58, "round", talk))
        ],
    )
    row(
        104,
        "local, diloco",
        "many steps, then a round",
        [
            (0, 250, "local steps", work),
            (252, 58, "round", talk),
            (312, 250, "local steps", work),
            (564, 58, "round", talk),
        ],
    )
    row(164, "diloco, streaming", "rounds beside training", [(0, 622, "local steps", work)])
    for one in range(4):
        picture.box(206 + 160 * one, 206, 100, 24, f"fragment {one + 1}", talk)
    row(
        240,
        "gossip",
        "pairs, no common state",
        [
            (0, 190, "local steps", work),
            (192, 58, "pair", talk),
            (252, 190, "local steps", work),
            (444, 58, "pair", talk),
            (504, 118, "local steps", work),
        ],
    )
    picture.box(176, 296, 16, 16, "", work)
    picture.text(200, 309, "compute", size=12)
    picture.box(280, 296, 16, 16, "", talk)
    picture.text(304, 309, "network", size=12)
    picture.save()


def experts() -> None:
    picture = Picture(
        "experts",
        "A mixture: the gate chooses experts for each sample; servers host them, with replicas",
        860,
        320,
    )
    picture.box(20, 112, 150, 92, "your process\ngate, other layers,\noptimizer")
    servers = ("server 1\nffn.0.0  ffn.0.1", "server 2\nreplicas of server 1", "server 3\nffn.1.0  ffn.1.1")
    for number, text in enumerate(servers):
        y = 32 + 92 * number
        picture.box(420, y, 190, 64, text, GREEN)
        picture.arrow(172, 140 + 12 * number, 416, y + 32)
        picture.arrow(416, y + 44, 172, 152 + 12 * number, dashed=True)
        picture.box(660, y + 8, 176, 48, "learns by itself:\none step per batch", PLAIN)
        picture.arrow(612, y + 32, 658, y + 32, plain=True)
    picture.text(180, 76, "one call per expert and batch", size=12, colour=GREY)
    picture.text(180, 260, "outputs; backward: gradients", size=12, colour=GREY)
    picture.arrow(515, 98, 515, 122, both=True, dashed=True)
    picture.text(
        20,
        306,
        "Server 2 hosts the same experts as server 1: "
        "callers use the quicker one, and their parameters are averaged.",
        colour=GREY,
    )
    picture.save()


def simulation() -> None:
    picture = Picture("simulation", "In a simulated swarm only sockets and clocks are replaced", 860, 300)
    picture.box(40, 40, 360, 56, "services of the program, unchanged\nDHT, groups, rounds, state, experts")
    picture.box(460, 40, 360, 56, "services of the program, unchanged\nDHT, groups, rounds, state, experts")
    picture.box(40, 128, 360, 40, "gRPC, TLS, TCP", GREEN)
    picture.box(460, 128, 360, 40, "simulated network: delay, loss, cuts, crashes", YELLOW)
    picture.box(40, 184, 360, 40, "event loop, system clock", GREEN)
    picture.box(460, 184, 360, 40, "virtual event loop: hours pass in minutes", YELLOW)
    picture.text(220, 28, "a real peer", anchor="middle", bold=True)
    picture.text(640, 28, "a simulated peer, one of up to 10,000", anchor="middle", bold=True)
    picture.box(460, 240, 360, 40, "one seed: faults, workload; checkers know everything", RED)
    picture.save()


def connections() -> None:
    picture = Picture("connections", "Which peer dials which other peer, and on which port", 860, 420)
    picture.box(330, 30, 200, 60, "entry point, relay\nlistens on TCP 4000, 4001", GREEN)
    picture.box(40, 160, 200, 60, "volunteer\nlistens on a TCP port")
    picture.box(330, 160, 200, 60, "volunteer\nlistens on a TCP port")
    picture.box(620, 160, 200, 60, "client\nlistens nowhere", YELLOW)
    picture.box(40, 270, 200, 60, "volunteer behind a router\nreached through the relay", YELLOW)
    picture.box(620, 270, 200, 60, "volunteer behind a router\nreached through the relay", YELLOW)
    picture.arrow(160, 158, 350, 92, both=True)
    picture.arrow(430, 158, 430, 92, both=True)
    picture.arrow(242, 190, 328, 190, both=True)
    picture.arrow(618, 190, 532, 190)
    picture.arrow(700, 158, 520, 92)
    picture.arrow(242, 290, 370, 222)
    picture.arrow(618, 290, 490, 222)
    picture.arrow(242, 310, 618, 310, "hole punching, where the routers allow it", both=True, dashed=True)
    picture.text(
        40,
        362,
        "An arrow points from the peer that dials to the peer that is dialed. "
        "All calls of a pair use mutual TLS on the one port\n"
        "of the callee: DHT, groups, rounds, state, experts. "
        "Relays carry the calls to peers behind routers, on a port of their own.\n"
        "Two other ports exist on request only: "
        "the page of a monitor (--web) and its metrics (--prometheus).",
        colour=GREY,
    )
    picture.save()


def history() -> None:
    picture = Picture(
        "history", "A history that is cut in two: one side breaks, and gives up its epochs", 860, 300
    )
    picture.text(20, 34, "each certificate names the head that it follows", size=12, colour=GREY)
    for number, text in enumerate(
        ("genesis", "certificate 1\nvotes of A, B, C", "certificate 2\nvotes of A, B, C")
    ):
        picture.box(20 + 150 * number, 110, 130, 56, text)
        if number:
            picture.arrow(150 * number + 2, 138, 18 + 150 * number, 138)
    picture.arrow(452, 130, 508, 84)
    picture.arrow(452, 146, 508, 206)
    picture.box(510, 54, 130, 56, "certificate 3\nvotes of A, B", GREEN)
    picture.arrow(642, 82, 688, 82)
    picture.box(690, 54, 150, 56, "certificate 4\nvotes of A, B, C", GREEN)
    picture.box(510, 178, 130, 56, "break\nvote of C alone", RED)
    picture.arrow(642, 200, 740, 114, dashed=True)
    picture.text(510, 40, "two of three electors are a quorum: they continue", size=12, colour=GREY)
    picture.text(510, 256, "C waits for the grace, then breaks; after the cut", size=12, colour=GREY)
    picture.text(510, 273, "it gives up these epochs and loads the state of A, B", size=12, colour=GREY)
    picture.save()


def sequences() -> None:
    sequence(
        "store",
        "A record from dht.store to its replicas",
        ["your thread", "this peer", "peers nearby", "replicas"],
        [
            (0, 1, "dht.store(key, value, ttl_s)"),
            (1, 1, "check and sign"),
            (1, 2, "Find: who is nearest to the key?"),
            (2, 1, "contacts"),
            (1, 3, "Store: the record"),
            (3, 3, "check signature, rules, quotas"),
            (3, 1, "held, or the reason why not"),
            (1, 0, "StoreResult(replicas=5)"),
        ],
    )
    sequence(
        "step",
        "A gradient from opt.step() to the averaged parameters",
        ["your loop", "this peer", "members of the group", "DHT"],
        [
            (0, 1, "opt.step()"),
            (1, 1, "add the gradients, count the samples"),
            (1, 3, "progress: epoch, samples, pace"),
            (1, 1, "the target of the swarm is reached"),
            (1, 2, "Seek, Join: one group"),
            (1, 2, "Exchange: shards, encoded"),
            (2, 1, "Exchange: averages, encoded"),
            (1, 2, "Vote: digest of all averages"),
            (1, 1, "commit: decode, inner optimizer steps"),
            (1, 0, "StepReport(stepped=True)"),
        ],
    )
    sequence(
        "join",
        "From swarm join to the first step",
        ["swarm join", "DHT", "donors", "members of the run"],
        [
            (0, 1, "who is there, which runs?"),
            (1, 0, "signed specification"),
            (0, 0, "say what it costs; ask the user"),
            (0, 1, "progress and donors of the run"),
            (0, 2, "Open: a lease on the state of one epoch"),
            (2, 0, "digests of its chunks; the chunks"),
            (0, 3, "meanwhile: rounds at weight 0"),
            (0, 0, "load, replay the rounds since then"),
            (0, 3, "rounds with its own samples"),
        ],
    )
    sequence(
        "mixture",
        "Forward and backward pass of a mixture layer",
        ["your model", "mixture layer", "DHT", "servers"],
        [
            (0, 1, "forward: inputs"),
            (1, 1, "gate scores; best experts that exist"),
            (1, 2, "declarations, remembered"),
            (1, 3, "Call: the samples of one expert"),
            (3, 1, "outputs; late ones are replaced"),
            (1, 0, "weighted sum of answers"),
            (0, 1, "backward: gradient"),
            (1, 3, "Call: gradients, applied once"),
            (3, 1, "gradients of the inputs"),
        ],
    )


def main() -> None:
    for draw in (overview, discovery, phases, modes, experts, simulation, connections, history, sequences):
        draw()


if __name__ == "__main__":
    main()
