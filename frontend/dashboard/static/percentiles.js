// Percentiles from cumulative histograms.

/** Return the counts since an earlier state of a histogram, or all counts without one. */
export function since(now, earlier) {
  if (!earlier || earlier.counts.some((count, index) => count > now.counts[index])) return now;
  return { edges: now.edges, counts: now.counts.map((count, index) => count - earlier.counts[index]) };
}

/** Return the value below which a fraction of the counts lies, interpolated linearly within a bucket; null without counts. */
export function percentile({ edges, counts }, fraction) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (!total) return null;
  let left = fraction * total;
  for (let index = 0; index < counts.length; index += 1) {
    if (counts[index] && left <= counts[index]) {
      if (index === edges.length) return edges[index - 1]; // values beyond the last edge are unbounded
      const low = index ? edges[index - 1] : 0;
      return low + ((edges[index] - low) * left) / counts[index];
    }
    left -= counts[index];
  }
  return edges.at(-1);
}
