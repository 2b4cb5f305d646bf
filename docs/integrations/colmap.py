"""Learned structure from motion with pycolmap's wheel alone, step by step."""

import pycolmap

import matcher


def reconstruct(photos, work, preset="hybrid-learned", **options):
    """Match a folder of photos, write COLMAP's database, map; returns pycolmap's models by number."""
    run = matcher.Collection.open(work / "run", preset=preset, **options)
    run.add_images(photos)
    run.add_pairs(exhaustive=True)  # or similar=20, sequential=5, file="pairs.txt"
    run.run()
    run.export("colmap", work / "database.db")
    (work / "sparse").mkdir()
    return pycolmap.incremental_mapping(work / "database.db", photos, work / "sparse")
