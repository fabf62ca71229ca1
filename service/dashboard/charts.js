// Bars and lines. Text only ever goes in as text, never as markup.

/** Fill `element` with bars: [{label, value, of, text}]; `of` is the length of a full bar. */
export function bars(element, entries) {
  element.replaceChildren(
    ...entries.flatMap(({ label, value, of, text }) => {
      const name = document.createElement("span");
      name.textContent = label;
      const meter = document.createElement("meter");
      meter.max = of || 1;
      meter.value = Math.min(value, meter.max);
      const number = document.createElement("span");
      number.textContent = text;
      return [name, meter, number];
    }),
  );
}

/** Draw `points` ([[time, value]], values may be undefined) into an SVG of 300 x 60; returns the largest value. */
export function line(svg, points) {
  const known = points.filter(([, value]) => value !== undefined);
  const top = Math.max(...known.map(([, value]) => value), 0);
  const first = points.length ? points[0][0] : 0;
  const span = points.length ? points[points.length - 1][0] - first : 0;
  let drawn = "";
  let pen = "M";
  for (const [time, value] of points) {
    if (value === undefined) {
      pen = "M";
      continue;
    }
    const x = span ? ((time - first) / span) * 300 : 300;
    const y = top ? 57 - (value / top) * 54 : 57;
    drawn += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
    pen = "L";
  }
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", drawn);
  svg.replaceChildren(path);
  return top;
}
