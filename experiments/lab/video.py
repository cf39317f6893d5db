"""Films of episodes side by side: Procgen's picture, under it the return and the probabilities of the actions."""

import itertools
from pathlib import Path

import imageio.v3 as iio
import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

from lab.common import written

ACTIONS = "↙←↖↓•↑↘→↗DAWSQE"  # in Procgen's order: directions, and the keys of what else a game offers
BACKGROUND, TEXT, FAINT, BAR, CHOSEN = (16, 18, 24), (240, 240, 240), (150, 156, 168), (86, 118, 168), (255, 176, 32)
SOLVED = (96, 220, 120)
FONT = Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf")  # has arrows


class Panel:
    """One episode's place in the film."""

    def __init__(self, title, scale):
        self.title, self.size = title, round(512 * scale / 16) * 16  # H.264 works in blocks of 16 pixels
        self.strip, self.picture = self.size // 2, None
        self.big, self.small = (ImageFont.truetype(FONT, max(x, self.size // y)) for x, y in ((11, 22), (8, 30)))

    def draw(self, picture, level, score, length, probabilities, action, solved=None):
        """One step: what the agent sees, and what it is about to do; at the end, whether the level is solved."""
        size, strip, pad, small = self.size, self.strip, self.size // 40, self.small
        self.picture = Image.new("RGB", (size, size + strip), BACKGROUND)
        picture = Image.fromarray(picture).resize((size, size), Image.Resampling.LANCZOS)
        self.picture.paste(picture if solved is None else picture.point(lambda x: int(0.4 * x)))
        pen = ImageDraw.Draw(self.picture)
        edge = [0, 0, size - 1, size + strip - 1]  # keeps panels apart where their pictures look alike
        pen.rectangle(edge, outline=BACKGROUND, width=max(1, size // 128))
        if solved is not None:
            word, colour = ("level complete", SOLVED) if solved else ("episode over", TEXT)
            pen.text((size / 2, size / 2), word, colour, self.big, anchor="mm")

        def line(y, left, right, colour, font):
            pen.text((pad, y), left, colour, font)
            pen.text((size - pad, y), right, colour, font, anchor="ra")

        line(size + pad // 2, self.title, f"level {level}", FAINT, small)
        line(size + pad + small.size, f"return {score:.4g}", f"step {length}", TEXT, self.big)
        line(size + strip // 3, "action probabilities (%)", "letters: special keys", FAINT, small)
        bottom, cell = size + strip - small.size - 2 * pad, (size - 2 * pad) / 15
        top = size + strip // 3 + 3 * small.size  # a number fits on a full bar
        for i, p in enumerate(probabilities):
            middle, height = pad + (i + 0.5) * cell, (bottom - top) * p
            box = [middle - 0.38 * cell, bottom - max(1, height), middle + 0.38 * cell, bottom]
            pen.rectangle(box, fill=CHOSEN if i == action else BAR)
            if p >= 0.005:
                pen.text((middle, bottom - height - pad / 5), f"{100 * p:.0f}", TEXT, small, anchor="mb")
            pen.text((middle, bottom + pad / 2), ACTIONS[i], FAINT, small, anchor="ma")


def film(rows, every, steps):
    """Pictures of episodes, of every third step, say. rows: (steps as evaluate.play gives them, a panel for each)."""
    played, panels = zip(*rows, strict=True)
    for t, moves in enumerate(itertools.islice(itertools.zip_longest(*played), steps)):
        for move, row in zip(moves, panels, strict=True):
            for i in () if move is None else move.active:
                shown = move.info[i]["rgb"], int(move.info[i]["level_seed"])
                if i in move.ended:
                    end = move.ended[i]
                    state = end["return"], end["length"], move.probabilities[i], move.action[i], end["solved"]
                    row[i].draw(*shown, *state)
                elif t % every == 0:
                    row[i].draw(*shown, move.returns[i], int(move.lengths[i]), move.probabilities[i], move.action[i])
        if t % every == 0:
            yield join(panels)
    for _ in range(15 // every):  # a second to read the outcome
        yield join(panels)


def join(panels):
    return np.concatenate([np.concatenate([np.asarray(x.picture) for x in row], axis=1) for row in panels])


def save_video(frames, path, fps):
    frames = tqdm(frames, "video", unit=" pictures", dynamic_ncols=True, disable=None)
    with written("--video", path) as temporary:
        if path.suffix.lower() == ".mp4":
            with iio.imopen(temporary, "w", plugin="pyav", extension=".mp4") as file:
                file.init_video_stream("libx264", fps=fps)
                for frame in frames:
                    file.write_frame(frame)
        else:
            # One palette for all and no dithering: what does not change costs next to nothing.
            frames = [Image.fromarray(frame) for frame in frames]
            some = Image.fromarray(np.concatenate(frames[:: len(frames) // 8 + 1]))
            palette = some.quantize(64, Image.Quantize.FASTOCTREE)
            first, *rest = (frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames)
            first.save(temporary, "GIF", save_all=True, append_images=rest, duration=round(1000 / fps), loop=0)
