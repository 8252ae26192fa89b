"""The page at `/`: a chat playground and a live view of the engine.

Plain HTML, CSS and JavaScript modules under `static/`, without a build step or resources from other hosts. The page
uses the public API like any other client; its only additional route returns the engine's state.
"""
