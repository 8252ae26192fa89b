// Draws on canvases: stacked bars over time, and a map of cells.

/** Return the cleared context of a canvas scaled to the screen's pixels. */
function prepare(canvas) {
  const scale = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return { context, width, height };
}

/** canvas has no light-dark(): let the browser resolve a custom property on an element instead. */
export function resolved(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}

function niceTop(value) {
  const scale = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].map((factor) => factor * scale).find((edge) => edge >= value);
}

/**
 * Draw one bar for each entry, its parts on top of one another.
 *
 * entries: lists of numbers; colours: names of custom properties, one for each part; limit: a line, or null.
 */
export function drawBars(canvas, entries, colours, { slots, limit = null, unit = "" }) {
  const { context, width, height } = prepare(canvas);
  const most = Math.max(1, limit ?? 0, ...entries.map((parts) => parts.reduce((sum, part) => sum + part, 0)));
  const top = niceTop(most);
  const left = 44;
  const step = (width - left) / slots;
  const y = (value) => height - 4 - ((height - 16) * value) / top;
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "right";
  context.fillStyle = resolved("muted");
  context.strokeStyle = resolved("line");
  for (const value of [0, top / 2, top]) {
    context.fillText(`${value.toLocaleString("en")}${unit}`, left - 6, y(value) + 4);
    context.beginPath();
    context.moveTo(left, y(value));
    context.lineTo(width, y(value));
    context.stroke();
  }
  const fills = colours.map(resolved);
  entries.slice(-slots).forEach((parts, index, shown) => {
    const x = left + step * (slots - shown.length + index);
    let below = 0;
    parts.forEach((part, kind) => {
      context.fillStyle = fills[kind];
      context.fillRect(x, y(below + part), Math.max(1, step - (step > 3 ? 1 : 0)), y(below) - y(below + part));
      below += part;
    });
  });
  if (limit !== null) {
    context.strokeStyle = resolved("bad");
    context.setLineDash([4, 4]);
    context.beginPath();
    context.moveTo(left, y(limit));
    context.lineTo(width, y(limit));
    context.stroke();
  }
}

/** Draw cells in rows, from runs of [state, length]; as large as possible. */
export function drawCells(canvas, runs, colours) {
  const { context, width, height } = prepare(canvas);
  const count = runs.reduce((sum, [, length]) => sum + length, 0);
  if (!count) return;
  // The largest size at which all cells fit, in whole pixels if possible.
  let size = Math.sqrt((width * height) / count);
  while (Math.floor(width / size) * Math.floor(height / size) < count) size *= 0.99;
  if (size >= 2) size = Math.floor(size);
  const columns = Math.floor(width / size);
  const gap = size > 4 ? 1 : 0;
  const fills = colours.map(resolved);
  let index = 0;
  for (const [state, length] of runs) {
    context.fillStyle = fills[state];
    for (const end = index + length; index < end; ) {
      const column = index % columns;
      const cells = Math.min(end - index, columns - column);
      const y = Math.floor(index / columns) * size;
      if (gap) for (let i = 0; i < cells; i += 1) context.fillRect((column + i) * size, y, size - gap, size - gap);
      else context.fillRect(column * size, y, cells * size, size);
      index += cells;
    }
  }
}
