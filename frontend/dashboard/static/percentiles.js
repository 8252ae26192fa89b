// Percentiles from histograms that only grow. Knows nothing of what they measure.

/** Return what was counted since an earlier state of a histogram; since its beginning when there is none. */
export function since(now, earlier) {
  if (!earlier || earlier.counts.some((count, index) => count > now.counts[index])) return now;
  return { edges: now.edges, counts: now.counts.map((count, index) => count - earlier.counts[index]) };
}

/** Return the value below which a fraction of the counts lies, by straight lines within a bucket; null without counts. */
export function percentile({ edges, counts }, fraction) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (!total) return null;
  let left = fraction * total;
  for (let index = 0; index < counts.length; index += 1) {
    if (counts[index] && left <= counts[index]) {
      if (index === edges.length) return edges[index - 1]; // beyond the last edge nothing is known
      const low = index ? edges[index - 1] : 0;
      return low + ((edges[index] - low) * left) / counts[index];
    }
    left -= counts[index];
  }
  return edges.at(-1);
}
