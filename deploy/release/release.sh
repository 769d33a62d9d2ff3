#!/usr/bin/env bash
# The steps of a release that release.yaml does not do by `make`, in its order:
#   release.sh check        refuses a tag that is not the version of pyproject.toml and the chart's appVersion
#   release.sh chart        dist/tandem-VERSION.tgz, whose images are those of REGISTRY
#   release.sh images       builds and pushes the images with SBOM and provenance; needs docker with buildx
#   release.sh push-chart   pushes the chart to REGISTRY/charts
#   release.sh sign         signs all that was pushed, without a key of its own (cosign asks for the workflow's identity)
# REGISTRY: HOST/PATH without a tag, for example ghcr.io/OWNER/REPOSITORY. TAG: the git tag. dist/digests.txt lists what
# was pushed. SOURCE_DATE_EPOCH (default: the commit's time) dates all files, so the same commit gives the same bytes.
set -euo pipefail
cd "$(dirname "$0")/../.."
fail() { echo "release: $1" >&2; exit 1; }

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
chart_version=$(sed -n 's/^version: //p' helm/tandem/Chart.yaml)
app_version=$(sed -n 's/^appVersion: "\(.*\)"$/\1/p' helm/tandem/Chart.yaml)
chart_file=dist/tandem-$chart_version.tgz
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH

registry() {
  [ -n "${REGISTRY:-}" ] || fail "REGISTRY: expected HOST/PATH for images and chart, got nothing"
  [ "$REGISTRY" = "${REGISTRY,,}" ] || fail "REGISTRY: expected lower case, as registries do, got $REGISTRY"
}

check() {
  [ "$app_version" = "$version" ] ||
    fail "helm/tandem/Chart.yaml: appVersion: expected $version as in pyproject.toml, got $app_version"
  [ "${TAG:-}" = "v$version" ] || fail "TAG: expected v$version, the version in pyproject.toml, got ${TAG:-nothing}"
}

# `tandem` in values.yaml becomes REGISTRY/tandem.
chart() {
  registry
  local helm work name
  helm=$(scripts/fetch-helm.sh helm)
  work=$(mktemp -d)
  cp -R helm/tandem "$work/tandem"
  for name in tandem tandem-router; do
    grep -q "^ *repository: $name\$" "$work/tandem/values.yaml" || fail "values.yaml: expected 'repository: $name', found none"
    sed -i "s|^\( *repository:\) $name\$|\1 $REGISTRY/$name|" "$work/tandem/values.yaml"
  done
  "$helm" package "$work/tandem" --destination dist
  rm -rf "$work"
}

images() {
  registry
  local base target name work
  work=$(mktemp -d)
  mkdir -p dist
  : >dist/digests.txt
  base=$(docker buildx imagetools inspect "$(sed -n 's/^ARG PYTHON_IMAGE=//p' deploy/docker/Dockerfile)" --format '{{.Manifest.Digest}}')
  for target in cpu cuda router vllm; do
    name=tandem
    [ "$target" = cpu ] || name=tandem-$target
    local arguments=(--build-arg "PYTHON_DIGEST=$base" --build-arg "VERSION=$version"
      --build-arg "REVISION=$(git rev-parse HEAD)" --build-arg "SOURCE_DATE_EPOCH=$SOURCE_DATE_EPOCH")
    # Without it torch brings the CUDA libraries.
    [[ "$target" != @(cpu|vllm) ]] || arguments+=(--build-arg "TORCH_PIP_ARGS=--index-url https://download.pytorch.org/whl/cpu")
    docker buildx build --file deploy/docker/Dockerfile --target "$target" "${arguments[@]}" \
      --attest type=sbom --attest type=provenance,mode=max --metadata-file "$work/metadata.json" \
      --output "type=image,name=$REGISTRY/$name:$version,push=true,oci-mediatypes=true,rewrite-timestamp=true" .
    pushed "$REGISTRY/$name" "$work/metadata.json"
  done
  rm -rf "$work"
}

push-chart() {
  registry
  local helm work
  helm=$(scripts/fetch-helm.sh helm)
  work=$(mktemp)
  "$helm" push "$chart_file" "oci://$REGISTRY/charts" 2>&1 | tee "$work"
  pushed "$REGISTRY/charts/tandem" "$work"
  rm "$work"
}

# Notes the digest of what was pushed, from the file with what the program that pushed it says. Args: name, file.
pushed() {
  local digest
  digest=$(sed -n 's/.*\(containerimage\.digest": "\|^Digest: \)\(sha256:[0-9a-f]\{64\}\).*/\2/p' "$2")
  [ -n "$digest" ] || fail "$1: expected the digest of what was pushed, got: $(cat "$2")"
  echo "$1@$digest" >>dist/digests.txt
  sort -u -o dist/digests.txt dist/digests.txt  # a step that runs again pushes the same
}

sign() {
  local name
  [ -s dist/digests.txt ] || fail "dist/digests.txt: expected what was pushed, found nothing; push first"
  while read -r name; do cosign sign --yes "$name"; done <dist/digests.txt
}

case ${1:-} in
  check | chart | images | push-chart | sign) "$1" ;;
  *) fail "expected check, chart, images, push-chart or sign, got '${1:-}'" ;;
esac
