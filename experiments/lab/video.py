"""Films of episodes side by side: Procgen's picture, under it the return and the probabilities of the actions."""

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
        self.pad, self.strip = self.size // 40, self.size // 2
        self.big, self.small = (ImageFont.truetype(FONT, max(x, self.size // y)) for x, y in ((11, 22), (8, 30)))
        self.picture = None

    def draw(self, picture, level, score, length, probabilities, action):
        """One step: what the agent sees, and what it is about to do."""
        size, pad, font = self.size, self.pad, self.small
        self.picture = Image.new("RGB", (size, size + self.strip), BACKGROUND)
        self.picture.paste(Image.fromarray(picture).resize((size, size), Image.Resampling.LANCZOS))
        pen = self.caption(level, score, length)
        y = size + self.strip // 3
        pen.text((pad, y), "action probabilities (%)", FAINT, font)
        pen.text((size - pad, y), "letters: special keys", FAINT, font, anchor="ra")
        bottom, cell = size + self.strip - font.size - 2 * pad, (size - 2 * pad) / 15
        top = y + 3 * font.size  # a number fits on a full bar
        for i, p in enumerate(probabilities):
            middle, height = pad + (i + 0.5) * cell, (bottom - top) * p
            box = [middle - 0.38 * cell, bottom - max(1, height), middle + 0.38 * cell, bottom]
            pen.rectangle(box, fill=CHOSEN if i == action else BAR)
            if p >= 0.005:
                pen.text((middle, bottom - height - pad / 5), f"{100 * p:.0f}", TEXT, font, anchor="mb")
            pen.text((middle, bottom + pad / 2), ACTIONS[i], FAINT, font, anchor="ma")

    def caption(self, level, score, length):
        pen, size, pad = ImageDraw.Draw(self.picture), self.size, self.pad
        pen.rectangle([0, size, size, size + self.strip // 3 - 1], fill=BACKGROUND)
        y = size + pad + self.small.size
        pen.text((pad, size + pad // 2), self.title, FAINT, self.small)
        pen.text((size - pad, size + pad // 2), f"level {level}", FAINT, self.small, anchor="ra")
        pen.text((pad, y), f"return {score:.4g}", TEXT, self.big)
        pen.text((size - pad, y), f"step {length}", TEXT, self.big, anchor="ra")
        edge = [0, 0, size - 1, size + self.strip - 1]  # keeps panels apart where their pictures look alike
        pen.rectangle(edge, outline=BACKGROUND, width=max(1, size // 128))
        return pen

    def end(self, episode):
        """Keep the last picture, dimmed, with the outcome on it."""
        size = self.size
        self.picture.paste(self.picture.crop((0, 0, size, size)).point(lambda x: int(0.4 * x)))
        pen = self.caption(episode["level"], episode["return"], episode["length"])
        word, colour = ("level complete", SOLVED) if episode["solved"] else ("episode over", TEXT)
        pen.text((size / 2, size / 2), word, colour, self.big, anchor="mm")


def film(rows, skip, steps):
    """Pictures of episodes, of every skip-th step. rows: (steps as evaluate.play gives them, a panel for each)."""
    shown, t = 0, 0
    while t < steps:
        moves = [(next(played, None), panels) for played, panels in rows]
        if all(move is None for move, _ in moves):
            break
        due = t >= shown * skip
        for move, panels in moves:
            for i in () if move is None else move.active:
                if due or i in move.ended:
                    state = int(move.info[i]["level_seed"]), move.returns[i], int(move.lengths[i])
                    panels[i].draw(move.info[i]["rgb"], *state, move.probabilities[i], move.action[i])
                if i in move.ended:
                    panels[i].end(move.ended[i])
        if due:
            shown += 1
            yield join(panels for _, panels in rows)
        t += 1
    for _ in range(round(15 / skip)):  # a second to read the outcome
        yield join(panels for _, panels in rows)


def join(rows):
    return np.concatenate([np.concatenate([np.asarray(x.picture) for x in panels], axis=1) for panels in rows])


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
