"""How a report looks: colours of a light and a dark page, one column on a narrow screen."""

STYLE = """
:root { color-scheme: light dark; --ground: #fcfcfb; --card: #fff; --text: #1f2328; --soft: #656d76; --edge: #d9dde2;
  --shade: #e9edf2; --good: #1a7f37; --bad: #c62828; --ordered: 42%;
  --c0: #2f6fb5; --c1: #d9702b; --c2: #2e9e62; --c3: #a04fb0; --c4: #b08a12; --c5: #c23b5a; --c6: #168aa0;
  --c7: #6b6f76; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171b; --card: #1b1f24; --text: #e3e7ec; --soft: #98a2ad;
  --edge: #343b43; --shade: #2a3038; --good: #4cc46c; --bad: #ff7b72; --ordered: 66%;
  --c0: #6cb0f2; --c1: #f39a5b; --c2: #5ccf8f; --c3: #cf8be0; --c4: #dfbe4d; --c5: #f27d96; --c6: #58c5d9;
  --c7: #a9b0b8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem clamp(.7rem, 3vw, 2.2rem) 3rem; max-width: 100rem; background: var(--ground);
  color: var(--text); font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { margin: .3rem 0 0; font-size: 1.5rem; } h2 { margin: 2rem 0 .6rem; font-size: 1.1rem; }
h3 { margin: 0 0 .3rem; font-size: .92rem; } p { margin: .3rem 0; } .soft, figcaption { color: var(--soft); }
.good { color: var(--good); } .bad { color: var(--bad); font-weight: 600; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 11rem), 1fr)); gap: .6rem;
  margin: 1rem 0; }
.cards div, figure, .scroll, details { background: var(--card); border: 1px solid var(--edge); border-radius: 8px; }
.cards div { padding: .5rem .8rem; } .cards b { display: block; font-size: 1.15rem; font-weight: 600; }
.cards span { color: var(--soft); font-size: .8rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr)); gap: .8rem; }
figure { margin: 0; padding: .7rem .8rem .5rem; min-width: 0; } figcaption { font-size: .82rem; }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, "DejaVu Sans", sans-serif; }
svg text { fill: var(--soft); } svg .y { text-anchor: end; } svg .x { text-anchor: middle; }
svg .grid { stroke: var(--edge); stroke-width: .6; } svg .axis { stroke: var(--soft); fill: none; }
svg .line { fill: none; stroke-width: 1.7; stroke-linejoin: round; } svg .band { opacity: .2; }
svg .shade { fill: var(--shade); } svg .mark { stroke: var(--c1); stroke-width: 1; } svg .note { font-size: 11px; }
svg .hover { fill: transparent; } svg .hover:hover { fill: var(--text); fill-opacity: .08; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem .9rem; margin: .2rem 0; padding: 0; list-style: none;
  font-size: .82rem; }
.legend i { display: inline-block; width: 1.3em; margin-right: .35em; border-top: 3px solid; vertical-align: middle; }
.legend .dashed { border-top-style: dashed; }
.scroll { overflow-x: auto; margin: .6rem 0; } table { border-collapse: collapse; width: 100%; font-size: .85rem; }
th, td { padding: .25rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--edge); }
th:first-child, td:first-child { text-align: left; } tr:last-child td { border-bottom: 0; }
th.text, td.text { white-space: normal; text-align: left; }
details { margin: .6rem 0; padding: .4rem .8rem; } summary { cursor: pointer; } details .plots { margin-top: .6rem; }
pre { overflow-x: auto; font-size: .8rem; white-space: pre-wrap; }
"""
