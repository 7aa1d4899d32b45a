{{/* Names, labels and the pieces several templates share. */}}

{{- define "evergrad.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* Of namespaced objects. 50 characters at most, so that suffixes fit. Helm allows releases names that a Service cannot have. */}}
{{- define "evergrad.fullname" -}}
{{- $full := .Values.fullnameOverride -}}
{{- if not $full -}}
{{- $name := include "evergrad.name" . -}}
{{- $full = ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- end -}}
{{- $full = $full | trunc 50 | trimSuffix "-" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $full) -}}
{{- fail (printf "fullnameOverride: the installation's objects would be called %q, which is no name of a Service. Set fullnameOverride to small letters, digits and hyphens that begin with a letter, or install under such a name." $full) -}}
{{- end -}}
{{- $full -}}
{{- end -}}

{{/* The Secret with the key of this installation. The operator makes it, so that no value and no release holds it. */}}
{{- define "evergrad.keyName" -}}
{{- printf "%s-key" (include "evergrad.fullname" .) -}}
{{- end -}}

{{/* Whether there is a webhook: "true" or nothing. */}}
{{- define "evergrad.webhook" -}}
{{- if eq (toString .Values.webhook.enabled) "auto" -}}
{{- if eq .Values.rbac.scope "cluster" }}true{{ end -}}
{{- else if .Values.webhook.enabled -}}
true
{{- end -}}
{{- end -}}

{{/* The Secret with the webhook's certificate, made by the operator or by cert-manager. */}}
{{- define "evergrad.webhookSecret" -}}
{{- printf "%s-webhook" (include "evergrad.fullname" .) -}}
{{- end -}}

{{/* Of objects of the whole cluster: two releases in two namespaces do not meet. */}}
{{- define "evergrad.clusterName" -}}
{{- printf "%s-%s" .Release.Namespace (include "evergrad.fullname" .) | trunc 110 | trimSuffix "-" -}}
{{- end -}}

{{- define "evergrad.selectorLabels" -}}
app.kubernetes.io/name: {{ include "evergrad.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "evergrad.labels" -}}
{{ include "evergrad.selectorLabels" . }}
{{ include "evergrad.otherLabels" . }}
{{- end -}}

{{- define "evergrad.otherLabels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: evergrad
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "evergrad.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "evergrad.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name: missing. With serviceAccount.create=false, name an existing ServiceAccount." .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* dict "image" VALUES "version" APPVERSION */}}
{{- define "evergrad.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (default .version .image.tag) -}}
{{- end -}}
{{- end -}}

{{/* The namespaces a namespaced operator serves, as a JSON list. */}}
{{- define "evergrad.namespaces" -}}
{{- default (list .Release.Namespace) .Values.rbac.watchNamespaces | uniq | toJson -}}
{{- end -}}

{{/* What the operator may do where it serves runs. tests/unit/repository holds it to its table. */}}
{{- define "evergrad.rules" -}}
- apiGroups: [evergrad.dev]
  resources: [trainingruns]
  verbs: [list, watch{{ if (.Values.runs.allowed | default dict).deletion }}, delete{{ end }}]
- apiGroups: [evergrad.dev]
  resources: [trainingruns/status]
  verbs: [patch]
# For owner references with blockOwnerDeletion, where the cluster enforces permissions on them.
- apiGroups: [evergrad.dev]
  resources: [trainingruns/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, create, delete]
# Server-side apply is patch, and create for what does not exist yet.
- apiGroups: [""]
  resources: [configmaps, services]
  verbs: [list, create, patch, delete]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch, create, patch]
# A token for each run. The operator reads, lists and changes no Secret of a run.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
# What is switched off is deleted where it is left of before; only making it goes with the switch.
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: {{ ternary (list "list" "create" "patch" "delete") (list "list" "delete") .Values.runs.disruptionBudgets | toJson }}
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: {{ ternary (list "list" "create" "patch" "delete") (list "list" "delete") .Values.runs.networkPolicies | toJson }}
{{- $gangs := dict "coscheduling" "scheduling.x-k8s.io" "podGroup" "scheduling.k8s.io" }}
{{- with get $gangs .Values.runs.gang }}
- apiGroups: [{{ . }}]
  resources: [podgroups]
  verbs: [list, create, patch, delete]
{{- end }}
{{- end -}}
