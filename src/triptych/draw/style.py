"""The style of a drawing: colours as custom properties, light and dark by the reader's preference."""

STYLE = """
.triptych-drawing { --paper: #fbfaf6; --ink: #1f1e1b; --quiet: #5f5b52; --line: #8d887c; --panel: #ffffff;
  --edge: #d5cfc1; --linear: #e3ecf8; --norm: #f4ead0; --act: #e0f1e9; --position: #f1e3f1; --core: #fdeadd;
  --value: #efece4; --even: #2b5ea7; --odd: #c4561a;
  --c0: #2b5ea7; --c1: #c4561a; --c2: #117a5c; --c3: #8b4c8c; --c4: #8a6d0b; }
@media (prefers-color-scheme: dark) { .triptych-drawing { --paper: #121319; --ink: #e9e6dd; --quiet: #aeaa9f;
  --line: #7d7a74; --panel: #191b23; --edge: #3a3e4a; --linear: #1f2f47; --norm: #3a3218; --act: #173428;
  --position: #37233a; --core: #40291c; --value: #262933; --even: #7fb0f5; --odd: #f39a5f;
  --c0: #7fb0f5; --c1: #f39a5f; --c2: #4fc4a0; --c3: #d39ad4; --c4: #d9bf55; } }
.triptych-drawing { font: 12px "Helvetica Neue", Arial, "Liberation Sans", sans-serif; max-width: 100%; height: auto; }
.triptych-drawing text { fill: var(--ink); }
.triptych-drawing .name, .triptych-drawing .label { font-weight: 700; }
.triptych-drawing .quiet { fill: var(--quiet); }
.triptych-drawing .title { font-size: 20px; font-weight: 700; }
.triptych-drawing rect { stroke: var(--edge); fill: var(--panel); }
.triptych-drawing .paper { fill: var(--paper); stroke: none; }
.triptych-drawing .frame, .triptych-drawing .fold { fill: none; stroke: var(--line); stroke-dasharray: 5 3; }
.triptych-drawing .bare { fill: none; stroke: none; }
.triptych-drawing .panel { fill: var(--panel); stroke-width: 2; }
.triptych-drawing .linear { fill: var(--linear); }
.triptych-drawing .norm { fill: var(--norm); }
.triptych-drawing .act { fill: var(--act); }
.triptych-drawing .position { fill: var(--position); }
.triptych-drawing .core { fill: var(--core); }
.triptych-drawing .value { fill: var(--value); }
.triptych-drawing .block { stroke-width: 2; }
.triptych-drawing .colour-0 { stroke: var(--c0); }
.triptych-drawing .colour-1 { stroke: var(--c1); }
.triptych-drawing .colour-2 { stroke: var(--c2); }
.triptych-drawing .colour-3 { stroke: var(--c3); }
.triptych-drawing .colour-4 { stroke: var(--c4); }
.triptych-drawing .query, .triptych-drawing .key { stroke: none; }
.triptych-drawing .even { fill: var(--even); }
.triptych-drawing .odd { fill: var(--odd); }
.triptych-drawing path { fill: none; stroke: var(--line); stroke-width: 1.4; }
.triptych-drawing .head { fill: var(--line); stroke: none; }
.triptych-drawing .tie { stroke-dasharray: 2 4; }
.triptych-drawing .cross { stroke: var(--c1); }
.triptych-drawing .sum { fill: var(--panel); stroke: var(--line); stroke-width: 1.4; }
"""
