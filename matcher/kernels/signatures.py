"""What the functions of the library take, by their names without `matcher_`."""

from ctypes import c_float, c_int, c_long, c_void_p

RETURNING_LONG = ("join", "peaks")
SIGNATURES = {
    "attend": [*[c_void_p] * 5, *[c_long] * 4, c_int],
    "attend_vectors": [*[c_void_p] * 5, c_int, *[c_long] * 4, c_int],
    "normalise_gelu": [c_void_p, c_int, c_long, c_long, *[c_void_p] * 3, c_float, c_int],
    "add": [c_void_p, c_void_p, c_int, c_long, c_long, c_void_p, c_void_p, c_int],
    "turn": [c_void_p, c_int, *[c_long] * 4, c_void_p, c_void_p, c_int],
    "absorb": [c_void_p, *[c_long] * 3, c_void_p, c_void_p, c_float, c_void_p, c_int],
    "candidates": [*[c_void_p] * 4, *[c_long] * 4, *[c_void_p] * 7, c_int],
    "join": [*[c_long] * 3, *[c_void_p] * 13],
    "transport": [
        *[c_long] * 2,
        *[c_void_p] * 11,
        c_float,
        *[c_void_p] * 2,
        *[c_int] * 2,
        c_long,
        c_float,
        c_void_p,
        c_int,
    ],
    "best": [c_long, c_long, *[c_void_p] * 8],
    "support": [c_long, *[c_void_p] * 8, c_int],
    "fit": [*[c_void_p] * 3, c_long, *[c_void_p] * 3, c_int],
    "fit_windows": [*[c_void_p] * 5, c_long, c_void_p, c_int],
    "add_enlarged": [c_void_p, c_void_p, c_int, *[c_long] * 3, c_void_p, c_int],
    "score_pixels": [c_void_p, c_int, *[c_long] * 3, *[c_void_p] * 3, c_int],
    "sample": [c_void_p, c_int, *[c_long] * 3, c_void_p, c_long, c_float, c_void_p, c_long, c_int],
    "peaks": [c_void_p, *[c_long] * 5, c_void_p, c_long, c_int],
}
