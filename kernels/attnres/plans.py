"""How the kernels of the mixture over depth are cut up: plain arithmetic, nothing is tuned at run
time, and nothing that changes a row depends on how many rows there are."""

from __future__ import annotations

from functools import lru_cache

LINE = 8  # adjacent elements that a thread loads at once, 16 bytes of bf16
# Forward, where a row is short: half of the warps for a row, so that more rows are on their way.
SHORT, SHORT_LINE, SHORT_RESIDENT = 4096, 16, 16
WARPS = 16  # of a program, which takes whole rows, at most
RESIDENT, BACKWARD_RESIDENT = 24, 16  # warps of an SM that registers must suffice for
PROGRAMS = 1024  # in which rows are spread before a program gets a second one

# On Hopper, of a streaming multiprocessor:
REGISTERS = 65536
SHARED, RESERVED = 233472, 1024  # bytes of shared memory, of which each program takes some for good
NARROWEST, WIDEST = 256, 8192  # rows that the Hopper kernels take
# Of a row for a warp, 16 for a thread, but in rows that take `MOST_WARPS` then: a program of more
# waits at its barriers longer than registers gain, and leaves no room for another beside it.
ELEMENTS, MOST_WARPS = 512, 8
GLUON_RESIDENT, GLUON_BACKWARD_RESIDENT = 20, 16  # warps, the latter of 16 elements a thread
GROUP = 5  # sources that are reduced at once, at most
LEAST_RING, RING = 3, 4  # groups in shared memory, of which one is read and the others are coming
# On the way back: two rows of all sources, so that one is coming throughout, if so many warps
# remain. One row alone is followed source by source, and its program takes more warps instead.
LEAST_RESIDENT, ALONE_WARPS = 8, 16
BACKWARD_RING = 2  # carried gradients in shared memory, for each of these rows


def rows_each(rows: int, most: int) -> int:
    """Rows of a program: depends on nothing but their number, as the partial sums do on it."""
    return max(1, min(most, rows // PROGRAMS))


def forward_tile(width: int) -> dict[str, int]:
    if width <= SHORT:
        return tile_of(width, SHORT_RESIDENT, SHORT_LINE)
    return tile_of(width, RESIDENT)


def tile_of(width: int, resident: int, line: int = LINE) -> dict[str, int]:
    """The tile of a row, and how many registers its programs may use for ``resident`` warps."""
    padded = max(line, 1 << (width - 1).bit_length())
    warps = min(WARPS, max(1, padded // (32 * line)))
    return {
        "D": width,
        "BT": padded // line,
        "BE": line,
        "num_warps": warps,
        "maxnreg": registers_for(max(warps, resident // warps * warps)),
    }


def registers_for(warps: int) -> int:
    return min(255, REGISTERS // (32 * warps) // 8 * 8)


def padded_to(width: int) -> int:
    return max(NARROWEST, 1 << (width - 1).bit_length())


def hopper_tile(width: int, warps: int, programs: int) -> tuple[dict[str, int], int]:
    """The tile of a row, and rows that fit in the shared memory of one program."""
    padded = padded_to(width)
    tile = {
        "D": width,
        "WARPS": warps,
        "COLS": padded // warps,
        "num_warps": warps,
        "maxnreg": registers_for(programs * warps),
    }
    sums = 1024 + 64 * warps
    return tile, (SHARED // programs - RESERVED - sums) // (2 * padded)


def warps_for(width: int, most: int = MOST_WARPS) -> int:
    return max(1, min(most, padded_to(width) // ELEMENTS))


@lru_cache
def forward_plan(width: int, sources: int, updated: bool) -> tuple[dict[str, int], int] | None:
    """Constants of `mix_hopper_kernel` and its programs on a multiprocessor; None: does not fit."""
    if not NARROWEST <= width <= WIDEST or width % LINE:
        return None
    warps = warps_for(width)
    programs = GLUON_RESIDENT // warps
    tile, room = hopper_tile(width, warps, programs)
    items = sources + updated
    groups = -(-items // min(GROUP, room // LEAST_RING))
    size = max(1 + updated, -(-items // groups))
    return tile | {"GROUP": size, "RING": min(RING, room // size)}, programs


@lru_cache
def backward_plan(width: int, sources: int) -> tuple[dict[str, int], int] | None:
    """Constants of `mix_backward_hopper_kernel`, likewise."""
    if not NARROWEST <= width <= WIDEST or width % LINE:
        return None
    padded, kept = padded_to(width), max(32, 1 << (2 * sources).bit_length())
    for sets, most, resident in ((2, MOST_WARPS, LEAST_RESIDENT), (1, ALONE_WARPS, 1)):
        warps = warps_for(width, most)
        ring = sets * min(BACKWARD_RING, sources)
        for programs in range(GLUON_BACKWARD_RESIDENT * ELEMENTS // max(ELEMENTS, padded), 0, -1):
            tile, room = hopper_tile(width, warps, programs)
            if programs * warps >= resident and sets * (sources + 1) + ring <= room:
                return tile | {"SETS": sets, "RING": ring, "KEPT": kept}, programs
    return None
